"""Where a server or a deployment records to: a store that it opens, or a collector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cotune.collecting.sender import Sender, is_collector, sender
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store


@contextlib.contextmanager
def open_sink(address: str | Path, app: str = "") -> Iterator[Store | Sender]:
    """The store at an address, closed at the end, or this process's sender to a collector, for the application `app`
    (default: COTUNE_APP). Raises ConfigError, RunError."""
    if is_collector(address):
        yield sender(str(address), app)
        return
    with open_store(address) as store:
        yield store
