"""A records file on its own, as someone copies it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cotune.storage.sqlite_store import SqliteStore


@contextmanager
def copied(run: Path) -> Iterator[SqliteStore]:
    """The copy of `run/records.db` alone, opened in an empty folder."""
    alone = run.parent / f"{run.name}-copy"
    alone.mkdir()
    shutil.copy(run / "records.db", alone)
    with SqliteStore.open(alone, read_only=True) as store:
        yield store
