"""Where a server or a deployment records to: a store that it opens, or a collector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cotune.collect.sender import Sender, is_collector, sender
from cotune.storage.open_store import is_path, open_store
from cotune.storage.protocol import Store


@contextlib.contextmanager
def open_sink(address: str | Path, app: str = "") -> Iterator[Store | Sender]:
    """The store at an address, closed at the end, or this process's sender to a collector, for the application `app`
    (default: COTUNE_APP). Raises ConfigError, RunError."""
    if is_collector(address):
        yield sender(str(address), app)
        return
    with open_folder(address) as store:
        yield store


def open_folder(address: str | Path) -> Store:
    """The store at an address; a path without a suffix is a run folder, which is made. Raises ConfigError, RunError."""
    if is_path(address) and not Path(address).suffix:
        Path(address).mkdir(parents=True, exist_ok=True)
    return open_store(address)
