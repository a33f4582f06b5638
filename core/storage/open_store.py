"""The one place that says which store an address leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cotune.errors import RunError
from cotune.storage.protocol import Store
from cotune.storage.sqlite_store import SqliteStore

STORES: Mapping[str, Callable[[str | Path, bool], Store]] = {"": SqliteStore.open}
"""Stores by the scheme of their addresses; a path has none."""


def open_store(address: Path | str, read_only: bool = False) -> Store:
    """Open the records at an address: a run folder, or a records file. A writer creates the file.

    Raises RunError when another process writes it, or it cannot be opened.
    """
    scheme, colon, _ = str(address).partition("://")
    if not colon:
        scheme = ""
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES if name) or "none"
        cause = f"No store is known for the address {address} (known: {known})."
        raise RunError(cause, "Name a run folder or its records file.")
    return STORES[scheme](address, read_only)


def no_records(folder: Path) -> Store:
    """The records of a run folder that has none."""
    return SqliteStore.empty(folder)
