"""Open the destination of records: a store, or a collector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cotune.collect.sink import Collector
from cotune.entry_points import COLLECTORS, entry_points_by_scheme, load_entry_point, scheme_of
from cotune.storage.open_store import is_path, open_store
from cotune.storage.protocol import Store


def is_collector(address: object) -> bool:
    """Whether an address is a collector's and not a store's."""
    scheme = scheme_of(address) if isinstance(address, str) else ""
    return bool(scheme) and scheme in entry_points_by_scheme(COLLECTORS)


def open_collector(address: str, app: str = "") -> Collector:
    """This process's connection to a collector, for the application `app` (default: COTUNE_APP). It is shared and
    stays open. Raises ConfigError, RunError."""
    collector: Collector = load_entry_point(COLLECTORS, scheme_of(address))(address, app)
    return collector


@contextlib.contextmanager
def open_sink(address: str | Path, app: str = "") -> Iterator[Store | Collector]:
    """Open the place at an address that records go to: a store, which is closed at the end of this context, or a
    collector, to which this process stays connected.

    `app` is the name of the application for a collector (default: COTUNE_APP). Raises ConfigError, RunError.
    """
    if is_collector(address):
        yield open_collector(str(address), app)
        return
    with open_folder(address) as store:
        yield store


def open_folder(address: str | Path) -> Store:
    """The store at an address. A path without a suffix is a run folder, which is created. Raises ConfigError,
    RunError."""
    if is_path(address) and not Path(address).suffix:
        Path(address).mkdir(parents=True, exist_ok=True)
    return open_store(address)
