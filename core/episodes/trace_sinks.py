"""Where the records of a trace go: the memory, a store that the process has open, or a collector."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from cotune.records.structs import CallRecord, FeedbackRecord, Message, Record, RewardRecord
from cotune.runtime.last_flush import flush_at_signals, forget
from cotune.storage.open_store import is_path, open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RECORDS


class TraceSink(Protocol):
    """Takes the records of a trace, and gives back what can be read of them."""

    def write(self, records: Sequence[Record]) -> None: ...

    def reading(self) -> AbstractContextManager[MemoryRecords | Store]:
        """What has been written, as it can be read now. Raises RecordError where it cannot."""
        ...

    def close(self) -> None:
        """Nothing more is written but rewards."""
        ...


class MemoryRecords:
    """Keeps the records of one trace."""

    def __init__(self) -> None:
        self._calls: list[CallRecord] = []
        self._messages: dict[str, Any] = {}
        self._rewards: dict[str, dict[str, float]] = {}
        self._feedback: dict[str, dict[str, str]] = {}

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, CallRecord):
                self._calls.append(record)
            elif isinstance(record, Message):
                self._messages[record.id] = record.body
            elif isinstance(record, RewardRecord):
                self._rewards.setdefault(record.target, {})[record.name] = record.value
                self._feedback.get(record.target, {}).pop(record.name, None)  # it belonged to the reward before
            elif isinstance(record, FeedbackRecord):
                self._feedback.setdefault(record.target, {})[record.name] = record.text

    def calls(self, episode_id: str) -> list[CallRecord]:
        return sorted(self._calls, key=lambda call: call.step)

    def message(self, message_id: str) -> Any:
        return self._messages[message_id]

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        return {target: dict(self._rewards.get(target, {})) for target in targets}

    def feedback(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        return {target: dict(self._feedback.get(target, {})) for target in targets}

    def reading(self) -> AbstractContextManager[MemoryRecords]:
        return contextlib.nullcontext(self)

    def close(self) -> None: ...


_files: dict[str, tuple[Store, int]] = {}
"""Stores that traces of this process have open, and how many: a file has one writer."""
_lock = threading.Lock()


def _file(path: Path) -> str:
    return str((path / RECORDS if path.is_dir() else path).resolve())


def _fresh_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)


class FileRecords:
    """A records file, or another store, shared by all traces of this process that write to it. `durable`: a write
    returns once it is committed."""

    def __init__(self, address: str | Path, durable: bool = False) -> None:
        self._path = _file(Path(address)) if is_path(address) else str(address)
        self._durable = durable
        self._store: Store | None = self._take()

    def write(self, records: Sequence[Record]) -> None:
        if self._store is not None:
            self._store.write(records)
            if self._durable:
                self._store.flush()
            return
        store = self._take()
        store.write(records)
        self._release(store)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Store]:
        """What has been written, as it can be read now."""
        store = self._store
        if store is not None:
            store.flush()
            yield store
            return
        closed = open_store(self._path, read_only=True)
        try:
            yield closed
        finally:
            closed.close()

    def close(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            self._release(store)

    def _take(self) -> Store:
        with _lock:
            store, users = _files.get(self._path) or (open_store(self._path), 0)
            _files[self._path] = (store, users + 1)
            if not users:
                flush_at_signals(store.flush)
        return store

    def _release(self, store: Store) -> None:
        store.flush()
        with _lock:
            users = _files[self._path][1] - 1
            if users:
                _files[self._path] = (store, users)
            else:
                del _files[self._path]
                forget(store.flush)
                store.close()
