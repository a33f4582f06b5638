"""Where a trace keeps its records: in memory, or in a records file that several traces share."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cotune.recording.records import Call, Message, Record, Reward
from cotune.storage.run_layout import RECORDS
from cotune.storage.sqlite_store import SqliteStore


class Reader(Protocol):
    """The reading half of a `Store`, as far as a trace needs it."""

    def calls(self, episode_id: str) -> list[Call]: ...

    def message(self, message_id: str) -> Any: ...

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]: ...


class MemoryRecords:
    """Keeps the records of one trace."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._messages: dict[str, Any] = {}
        self._rewards: dict[str, dict[str, float]] = {}

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Call):
                self._calls.append(record)
            elif isinstance(record, Message):
                self._messages[record.id] = record.body
            elif isinstance(record, Reward):
                self._rewards.setdefault(record.target, {})[record.name] = record.value

    def calls(self, episode_id: str) -> list[Call]:
        return sorted(self._calls, key=lambda call: call.step)

    def message(self, message_id: str) -> Any:
        return self._messages[message_id]

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        return {target: dict(self._rewards.get(target, {})) for target in targets}

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        yield self

    def close(self) -> None: ...


_files: dict[Path, tuple[SqliteStore, int]] = {}
"""Records files that traces of this process have open, and how many: a file has one writer."""
_lock = threading.Lock()


def _fresh_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)


class FileRecords:
    """A records file, shared by all traces of this process that write to it."""

    def __init__(self, path: Path) -> None:
        self._path = (path / RECORDS if path.is_dir() else path).resolve()
        self._store: SqliteStore | None = self._take()

    def write(self, records: Sequence[Record]) -> None:
        if self._store is not None:
            self._store.write(records)
            return
        store = self._take()
        store.write(records)
        self._release(store)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """What has been written, as it can be read now."""
        store = self._store
        if store is not None:
            store.flush()
            yield store
            return
        closed = SqliteStore.open(self._path, read_only=True)
        try:
            yield closed
        finally:
            closed.close()

    def close(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            self._release(store)

    def _take(self) -> SqliteStore:
        with _lock:
            store, users = _files.get(self._path) or (SqliteStore.open(self._path), 0)
            _files[self._path] = (store, users + 1)
        return store

    def _release(self, store: SqliteStore) -> None:
        store.flush()
        with _lock:
            users = _files[self._path][1] - 1
            if users:
                _files[self._path] = (store, users)
            else:
                del _files[self._path]
                store.close()
