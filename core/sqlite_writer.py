"""The one writer of a records file: a bounded queue, a thread, and transactions of many records."""

from __future__ import annotations

import functools
import itertools
import logging
import sqlite3
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cotune.records import Record
from cotune.sqlite_rows import WIDTHS, Entry, Row, encode

log = logging.getLogger("cotune.store")

BATCH_RECORDS = 7500
"""Records that are committed at once without waiting for more."""
LINGER = 0.1
"""Seconds that a record waits for others to share its transaction."""
QUEUE_BYTES = 20 << 20
"""Bound of the queue in memory."""
PATIENCE = 5.0
"""Seconds that `put` waits, once, for room in a full queue. It drops at once while the disk fails, and after a wait in
vain until there is room again."""
RECENT_IDS = 16384
"""Content addresses known to be stored, in each of two generations."""
RETRY = (0.05, 2.0)
"""First and longest pause in seconds before a failed transaction is tried again."""

CONFLICTS = {
    **dict.fromkeys(("messages", "segments", "calls", "episodes"), "ON CONFLICT (id) DO NOTHING"),
    "rewards": "ON CONFLICT (target, name) DO UPDATE SET value = excluded.value, at = excluded.at",
}
MOST_ROWS = 2048
"""Rows per statement; SQLite takes up to 32,766 values in one. The interpreter lock is handed over once per statement,
and a busy application gives it back only after its switch interval: many small statements would starve the writer."""


class RecentIds:
    """A bounded set of ids known to be stored: two generations, the older one dropped when the younger is full."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: set[str] = set()
        self._old: set[str] = set()

    def __contains__(self, item: object) -> bool:
        return item in self._young or item in self._old

    def add(self, ids: Iterable[str]) -> None:
        self._young.update(ids)
        if len(self._young) >= self._size:
            self._old, self._young = self._young, set()


class Writer:
    """Takes records from any thread and commits them in order. `put` neither raises nor waits for the disk."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        """Own `connection` from now on; `name` is what log messages call the file."""
        self._db = connection
        self._name = name
        self._known = RecentIds(RECENT_IDS)
        self._queue: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._records = self._bytes = 0
        self._queued = self._done = self._urgent = 0
        self._idle = self._closing = self._failing = self._stalled = self._forked = False
        self._reported: set[str] = set()
        self._counted = {"lost": 0, "refused": 0}
        self._saved = dict(self._counted)
        self._any_closed = connection.execute("SELECT EXISTS (SELECT 1 FROM closed)").fetchone()[0] == 1
        self._thread = threading.Thread(target=self._run, name="cotune-store", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Records dropped since the store was opened."""
        return self._counted["lost"]

    @property
    def refused(self) -> int:
        """Rewards that came after their group was consumed, since the store was opened."""
        return self._counted["refused"]

    def put(self, records: Sequence[Record]) -> None:
        """Encode and queue records; what cannot be taken is counted in `lost`."""
        try:
            entry = encode(records, self._known)
        except (TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
            self._lose(len(records), "a record cannot be encoded", error)
            return
        self._enqueue(entry)
        if entry.failure:
            self._lose(entry.count, entry.failure)

    def consume(self, groups: Iterable[tuple[str, list[str]]], training_step: int) -> str | None:
        """Write the ledger after everything queued; return why that failed, or None."""
        entry = Entry(0)
        entry.groups, entry.step = list(groups), training_step
        self._enqueue(entry)
        self.flush()
        return entry.failure

    def flush(self) -> None:
        """Wait until everything queued so far is committed or counted as lost."""
        with self._changed:
            target = self._queued
            self._urgent = max(self._urgent, target)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= target or not self._thread.is_alive())

    def close(self) -> None:
        """Commit what is queued, end the thread and close the connection; safe to call twice."""
        if self._forked:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._db.close()

    def abandon(self) -> None:
        """In a forked child: take nothing any more, and leave the parent's connection alone."""
        self._changed = threading.Condition()
        self._forked = self._closing = True

    def _enqueue(self, entry: Entry) -> None:
        with self._changed:
            if self._bytes > QUEUE_BYTES and not (self._failing or self._stalled):
                eased = self._changed.wait_for(lambda: self._bytes <= QUEUE_BYTES or self._failing, PATIENCE)
                self._stalled = not eased
            if self._closing:
                entry.failure = "the store was opened by the parent process" if self._forked else "the store is closed"
            elif self._bytes > QUEUE_BYTES and entry.groups is None:
                entry.failure = "the queue is full, the disk is too slow or cannot be written"
            else:
                self._stalled = False
                self._queue.append(entry)
                self._queued += 1
                self._records += entry.count
                self._bytes += entry.bytes
                if self._idle or self._records >= BATCH_RECORDS:
                    self._changed.notify_all()

    def _run(self) -> None:
        while batch := self._take():
            self._settle(batch)
            with self._changed:
                self._done += len(batch)
                self._bytes -= sum(entry.bytes for entry in batch)
                self._changed.notify_all()
        if self._counted != self._saved:
            self._settle([])

    def _take(self) -> list[Entry]:
        """Wait for entries, then a moment for more of them; an empty list means the end."""
        with self._changed:
            self._idle = True
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._idle = False
            self._changed.wait_for(
                lambda: self._records >= BATCH_RECORDS or self._closing or self._urgent > self._done, LINGER
            )
            batch: list[Entry] = []
            taken = 0
            while self._queue and taken < BATCH_RECORDS:
                batch.append(self._queue.popleft())
                taken += batch[-1].count
            self._records -= taken
            return batch

    def _settle(self, batch: list[Entry]) -> None:
        """Commit a batch. Trouble with the disk is waited out, unless someone waits for the result."""
        pause, last = RETRY[0], False
        while True:
            try:
                self._commit(batch)
            except sqlite3.OperationalError as error:
                self._report("the file cannot be written", error)
                if last:
                    self._give_up(batch, error)
                    return
                last = self._pause(pause)
                pause = min(2 * pause, RETRY[1])
            except (sqlite3.Error, ValueError, OverflowError) as error:
                if len(batch) == 1:
                    self._give_up(batch, error)
                for entry in batch if len(batch) > 1 else ():
                    self._settle([entry])
                return
            else:
                self._failing = False
                return

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; True when someone waits, so that it must be the last one."""
        with self._changed:
            self._failing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._closing or self._urgent > self._done, seconds)

    def _give_up(self, batch: list[Entry], error: Exception) -> None:
        for entry in batch:
            entry.failure = str(error)
        self._lose(sum(entry.count for entry in batch), "records cannot be stored", error)

    def _lose(self, count: int, cause: str, error: Exception | None = None) -> None:
        with self._changed:
            self._counted["lost"] += count
        self._report(cause, error)

    def _report(self, cause: str, error: Exception | None = None) -> None:
        """Log each cause once; the counters say how often it struck."""
        if cause not in self._reported:
            self._reported.add(cause)
            log.error("%s: %s%s", self._name, cause, f" ({error})" if error else "")

    def _commit(self, batch: list[Entry]) -> None:
        """One transaction. Addresses count as known, and rewards as refused, only after it."""
        counted, refused = dict(self._counted), 0
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for is_ledger, entries in itertools.groupby(batch, lambda entry: entry.groups is not None):
                if is_ledger:
                    for entry in entries:
                        self._write_ledger(entry)
                else:
                    refused += self._write_rows(list(entries))
            counted["refused"] += refused
            self._write_counters(counted)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._any_closed = True
            raise
        self._saved = counted
        with self._changed:
            self._counted["refused"] += refused
        self._known.add(itertools.chain.from_iterable(entry.ids for entry in batch))
        if refused:
            self._report("a reward came after its group was consumed and is refused")

    def _write_rows(self, entries: list[Entry]) -> int:
        """Insert rows; return how many rewards were refused."""
        tables: dict[str, list[Row]] = {table: [] for table in WIDTHS}
        for entry in entries:
            for table, row in entry.rows:
                tables[table].append(row)
        admitted = self._admit(tables["rewards"]) if self._any_closed else tables["rewards"]
        refused = len(tables["rewards"]) - len(admitted)
        for table, rows in (tables | {"rewards": admitted}).items():
            self._insert(table, rows)
        return refused

    def _insert(self, table: str, rows: list[Row]) -> None:
        """Few statements, of few sizes: filled up with the last row, which changes nothing when it comes again."""
        for start in range(0, len(rows), MOST_ROWS):
            part = rows[start : start + MOST_ROWS]
            size = 1 << (len(part) - 1).bit_length()
            part += part[-1:] * (size - len(part))
            self._db.execute(_statement(table, size), [*itertools.chain.from_iterable(part)])

    def _admit(self, rows: list[Row]) -> list[Row]:
        """Rewards whose target, and the call it is a candidate of, are still open."""
        names = {name for target, *_ in rows for name in (target, target.rpartition(".")[0])}
        closed = {
            name
            for some in in_parts(names)
            for (name,) in self._db.execute(
                f"SELECT target FROM closed WHERE target IN ({','.join('?' * len(some))})", some
            )
        }
        return [row for row in rows if row[0] not in closed and row[0].rpartition(".")[0] not in closed]

    def _write_ledger(self, entry: Entry) -> None:
        groups = entry.groups or []
        self._db.executemany(
            "INSERT OR IGNORE INTO consumed VALUES (?, ?)", [(group, entry.step) for group, _ in groups]
        )
        targets = {name for group, members in groups for name in (group, *members)}
        self._db.executemany("INSERT OR IGNORE INTO closed VALUES (?)", [(name,) for name in targets])
        for some in in_parts({name.rpartition(".")[0] or name for name in targets}):
            marks = ",".join("?" * len(some))
            self._db.execute(f"INSERT OR IGNORE INTO closed SELECT episode FROM calls WHERE id IN ({marks})", some)
        self._any_closed = True

    def _write_counters(self, counted: Mapping[str, int]) -> None:
        if counted != self._saved:
            self._db.executemany(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                [(name, value - self._saved[name]) for name, value in counted.items()],
            )


@functools.cache
def _statement(table: str, rows: int) -> str:
    marks = f"({','.join('?' * WIDTHS[table])})"
    return f"INSERT INTO {table} VALUES {','.join([marks] * rows)} {CONFLICTS[table]}"


def in_parts(names: Iterable[str], size: int = 500) -> Iterator[list[str]]:
    """Cut names into lists short enough for one IN clause."""
    items = list(names)
    return (items[i : i + size] for i in range(0, len(items), size))
