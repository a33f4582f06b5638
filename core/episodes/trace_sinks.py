"""The destinations of a trace's records: memory, a store that the process has open, or a collector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from cotune.records.structs import CallRecord, FeedbackRecord, Message, Record, RewardRecord
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.shared_stores import acquire_store, release_store, shared_address


class TraceSink(Protocol):
    """Takes the records of a trace and lets you read them."""

    def write(self, records: Sequence[Record]) -> None: ...

    def reading(self) -> AbstractContextManager[MemoryRecords | Store]:
        """Read the records that have been written. Raises RecordError if they cannot be read."""
        ...

    def close(self) -> None:
        """Close the destination. Afterwards only rewards may be written."""
        ...


class MemoryRecords:
    """Keeps the records of one trace."""

    def __init__(self) -> None:
        self._calls: list[CallRecord] = []
        self._messages: dict[str, Any] = {}
        self._rewards: dict[str, dict[str, float]] = {}
        self._feedback: dict[str, dict[str, str]] = {}

    def write(self, records: Sequence[Record]) -> None:
        """Keep calls, messages, rewards and feedback. A later reward or text replaces the one of its name; other
        records are not readable from a trace, so they are dropped."""
        for record in records:
            if isinstance(record, CallRecord):
                self._calls.append(record)
            elif isinstance(record, Message):
                self._messages[record.id] = record.body
            elif isinstance(record, RewardRecord):
                self._rewards.setdefault(record.target, {})[record.name] = record.value
                self._feedback.get(record.target, {}).pop(record.name, None)  # the text of the replaced reward
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


class FileRecords:
    """A records file, or another store, shared by all traces of this process that write to it. With `durable`, a write
    returns only after it has been committed."""

    def __init__(self, address: str | Path, durable: bool = False) -> None:
        self._address = shared_address(address)
        self._durable = durable
        self._store: Store | None = acquire_store(self._address)

    def write(self, records: Sequence[Record]) -> None:
        """Queue records for the store. After `close` the store is opened only for this write."""
        if self._store is None:  # a reward after the end of the trace
            store = acquire_store(self._address)
            try:
                store.write(records)
            finally:
                release_store(self._address)
            return
        self._store.write(records)
        if self._durable:
            self._store.flush()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Store]:
        """A block that reads the records written so far. Yields the store: the one that this sink still writes to, or
        after `close` a store that is opened for this block."""
        if self._store is not None:
            self._store.flush()
            yield self._store
            return
        with open_store(self._address, read_only=True) as reopened_store:
            yield reopened_store

    def close(self) -> None:
        if self._store is not None:
            self._store = None
            release_store(self._address)
