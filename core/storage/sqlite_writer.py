"""The one writer of a records file: a bounded queue, a thread, and transactions of many records."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from cotune.records.structs import Record
from cotune.storage.schema import WIDTHS, encode, in_parts, insertion

log = logging.getLogger("cotune.store")

BATCH_RECORDS = 4000
"""Records that are committed at once without waiting for more; the next ones begin another transaction."""
LINGER = 0.2
"""Seconds that a record waits for others to share its transaction."""
LATE, YIELD = 0.23, 0.002
"""Age in seconds at which a record that is not committed makes `put` pause, and the seconds of one pause. A thread
that gives up the interpreter lock for microseconds only, as a busy application does, can starve the writer's."""
QUEUE_BYTES = 14 << 20
"""Bound of the queue in memory."""
PUT_TIMEOUT = 5.0
"""Seconds that `put` waits for room in a full queue. While the disk fails, or after one such time-out until there is
room again, it drops the records at once."""
RECENT_IDS = 32768
"""Content addresses that are known to be stored; with more, all are forgotten, and some are written again in vain."""
BROKEN = (sqlite3.Error, ValueError, OverflowError)
"""Raised for a row that no disk can hold; except sqlite3.OperationalError, whose cause is the disk."""
RETRY = (0.05, 2.0)
"""First and longest pause in seconds before a failed transaction is tried again."""

MOST_ROWS = 2048
"""Rows per statement; SQLite takes up to 32,766 values in one. The interpreter lock is handed over once per statement,
and a busy application gives it back only after its switch interval: many small statements would starve the writer."""


class Batch:
    """Rows that are committed together: the values of each table's rows, one after another.

    So a record leaves few objects behind: each costs again when the writer's thread, on another core, reads it.
    """

    __slots__ = ("bytes", "count", "puts", "since", "tables")

    def __init__(self) -> None:
        self.tables: dict[str, list[Any]] = {table: [] for table in WIDTHS}
        self.count = self.bytes = self.puts = 0
        self.since = time.monotonic()


class Ledger:
    """Groups that a training step consumed, with their members; None forgets those of this step and later ones. After
    `flush`, `failure` is why it could not be written."""

    count, bytes, puts = 0, 400, 1

    def __init__(self, groups: list[tuple[str, list[str]]] | None, step: int) -> None:
        self.groups = groups
        self.step = step
        self.since = time.monotonic()
        self.failure: str | None = None


class Writer:
    """Takes records from any thread and commits them in order. `put` neither raises nor waits for the disk."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        """Own `connection` to the file `name` from now on."""
        self._db = connection
        self._name = name
        self._opened = os.stat(name)  # noqa: PTH116
        self._known: set[str] = set()
        """Content addresses known to be stored."""
        self._queue: deque[Batch | Ledger] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._records = self._bytes = 0
        self._queued = self._done = self._urgent = 0
        self._since = math.inf
        self._idle = self._closing = self._failing = self._stalled = self._forked = False
        self._reported: set[str] = set()
        self._counted = {"lost": 0, "refused": 0}
        self._saved = dict(self._counted)
        try:
            self._any_closed = connection.execute("SELECT EXISTS (SELECT 1 FROM consumed)").fetchone()[0] == 1
        except BaseException:
            connection.close()
            raise
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
        """Encode and queue records; those that cannot be queued are counted in `lost`."""
        try:
            rows, size = encode(records, self._known)
        except (TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
            self._lose(len(records), "a record cannot be encoded", error)
            return
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                batch = self._queue[-1] if self._queue else None
                if not isinstance(batch, Batch) or batch.count >= BATCH_RECORDS:
                    batch = Batch()
                    self._queue.append(batch)
                for table, row in rows:
                    batch.tables[table].extend(row)
                batch.count += len(records)
                batch.bytes += size
                batch.puts += 1
                self._records += len(records)
                self._bytes += size
                self._queued += 1
                self._since = min(self._since, batch.since)
                if self._idle or self._records >= BATCH_RECORDS:
                    self._changed.notify_all()
                if time.monotonic() - self._since > LATE and not self._failing:
                    self._changed.wait(YIELD)
        if refusal:
            self._lose(len(records), refusal)

    def write_ledger(self, ledger: Ledger) -> str | None:
        """Write it after everything queued; return why that failed, or None."""
        with self._changed:
            ledger.failure = self._refusal(full=False)
            if ledger.failure is None:
                self._queue.append(ledger)
                self._queued += 1
                self._bytes += ledger.bytes
        self.flush()
        return ledger.failure

    def flush(self) -> None:
        """Wait until everything queued so far is committed or counted as lost."""
        with self._changed:
            target = self._queued
            self._urgent = max(self._urgent, target)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= target or not self._thread.is_alive())

    def close(self) -> None:
        """Commit the queue, fold the log into the file and close the connection; safe to call twice."""
        if self._forked:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._fold()
        self._db.close()

    def _fold(self) -> None:
        """Move the log into the file, so that the one file holds all records."""
        try:
            self._db.execute("PRAGMA busy_timeout = 1000")
            ((busy, _, _),) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            self._report("records are left in its -wal file: copy both", error)
        else:
            if busy:
                self._report("a reader holds it, so records are left in its -wal file: copy both")

    def abandon(self) -> None:
        """In a forked child: take nothing any more, and leave the parent's connection alone."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._forked = self._closing = True

    def _refusal(self, full: bool = True) -> str | None:
        """Why nothing can be queued, after one wait for room; None where it can. A ledger may overfill the queue."""
        if self._bytes > QUEUE_BYTES and not (self._failing or self._stalled):
            eased = self._changed.wait_for(lambda: self._bytes <= QUEUE_BYTES or self._failing, PUT_TIMEOUT)
            self._stalled = not eased
        if self._closing:
            return "the store was opened by the parent process" if self._forked else "the store is closed"
        if self._bytes > QUEUE_BYTES and full:
            return "the queue is full, the disk is too slow or cannot be written"
        self._stalled = False
        return None

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            self._settle(taken)
            with self._changed:
                self._done += taken.puts
                self._bytes -= taken.bytes
                self._since = self._queue[0].since if self._queue else math.inf
                self._changed.notify_all()
        if self._counted != self._saved:
            self._settle(Batch())

    def _take(self) -> Batch | Ledger | None:
        """Wait for something to write, then a moment for more of it; None at the end."""
        with self._changed:
            self._idle = True
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._idle = False
            self._changed.wait_for(
                lambda: self._records >= BATCH_RECORDS or self._closing or self._urgent > self._done, LINGER
            )
            if not self._queue:
                return None
            taken = self._queue.popleft()
            self._records -= taken.count
            return taken

    def _settle(self, taken: Batch | Ledger) -> None:
        """Commit. Trouble with the disk is waited out, unless someone waits for the result."""
        pause, last = RETRY[0], False
        while True:
            try:
                self._commit(taken)
            except sqlite3.OperationalError as error:
                self._report("the file cannot be written", error)
                if last:
                    self._give_up(taken, error)
                    return
                last = self._pause(pause)
                pause = min(2 * pause, RETRY[1])
            except BROKEN as error:
                self._give_up(taken, error)
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

    def _give_up(self, taken: Batch | Ledger, error: Exception) -> None:
        if isinstance(taken, Ledger):
            taken.failure = str(error)
        self._lose(taken.count, "records cannot be stored", error)

    def _lose(self, count: int, cause: str, error: Exception | None = None) -> None:
        with self._changed:
            self._counted["lost"] += count
        self._report(cause, error)

    def _report(self, cause: str, error: Exception | None = None) -> None:
        """Log each cause once; the counters hold how often it occurred."""
        if cause not in self._reported:
            self._reported.add(cause)
            log.error("%s: %s%s", self._name, cause, f" ({error})" if error else "")

    def _commit(self, taken: Batch | Ledger) -> None:
        """One transaction. Addresses count as known, rewards as refused and rows as lost, only after it."""
        counted, lost, refused = dict(self._counted), 0, 0
        if not self._is_there():
            raise sqlite3.OperationalError("the file has been removed or replaced")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if isinstance(taken, Ledger):
                self._write_ledger(taken)
            else:
                lost, refused = self._write_rows(taken.tables)
            counted["lost"] += lost
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
            self._counted["lost"] += lost
            self._counted["refused"] += refused
        if isinstance(taken, Batch) and not lost:
            if len(self._known) > RECENT_IDS:
                self._known.clear()
            for table in ("images", "messages", "segments"):
                self._known.update(taken.tables[table][:: WIDTHS[table]])
        if refused:
            self._report("a reward came after its group was consumed and is refused")

    def _is_there(self) -> bool:
        """Whether the path still leads to the file that is open: SQLite would write to one that was removed."""
        try:
            return os.path.samestat(os.stat(self._name), self._opened)  # noqa: PTH116
        except OSError:
            return False

    def _write_rows(self, tables: Mapping[str, list[Any]]) -> tuple[int, int]:
        """Insert rows; return how many could not be stored, and how many rewards were refused."""
        lost = refused = 0
        for table, values in tables.items():
            if table in ("rewards", "feedback") and values and self._any_closed:
                admitted = self._admit(values, WIDTHS[table])
                if table == "rewards":
                    refused = (len(values) - len(admitted)) // WIDTHS[table]
                values = admitted
            lost += self._insert(table, values)
        return lost, refused

    def _insert(self, table: str, values: list[Any]) -> int:
        """Few statements, of few sizes: filled up with the last row, which changes nothing when it comes again."""
        width, lost = WIDTHS[table], 0
        for start in range(0, len(values), MOST_ROWS * width):
            part = values[start : start + MOST_ROWS * width]
            rows = len(part) // width
            size = 1 << (rows - 1).bit_length()
            try:
                self._db.execute(insertion(table, size), part + part[-width:] * (size - rows))
            except sqlite3.OperationalError:
                raise
            except BROKEN:
                lost += self._insert_each(table, part)
        return lost

    def _insert_each(self, table: str, values: list[Any]) -> int:
        """Row by row, as one of them is broken; return how many could not be stored."""
        width, lost = WIDTHS[table], 0
        for start in range(0, len(values), width):
            try:
                self._db.execute(insertion(table, 1), values[start : start + width])
            except sqlite3.OperationalError:
                raise
            except BROKEN as error:
                lost += 1
                self._report("records cannot be stored", error)
        return lost

    def _admit(self, values: list[Any], width: int) -> list[Any]:
        """Rows of rewards, or of their texts, whose target, and the call it is a candidate of, are still open."""
        rows = [values[at : at + width] for at in range(0, len(values), width)]
        names = {name for target, *_ in rows for name in (target, target.rpartition(".")[0])}
        closed = {
            name
            for some in in_parts(names)
            for (name,) in self._db.execute(
                f"SELECT target FROM consumed WHERE target IN ({','.join('?' * len(some))})", some
            )
        }
        return [
            value for row in rows if row[0] not in closed and row[0].rpartition(".")[0] not in closed for value in row
        ]

    def _write_ledger(self, ledger: Ledger) -> None:
        if ledger.groups is None:
            self._db.execute("DELETE FROM consumed WHERE training_step >= ?", [ledger.step])
            return
        insert = (
            "INSERT INTO consumed VALUES (?, ?, ?) "
            "ON CONFLICT (target) DO UPDATE SET is_group = 1 WHERE excluded.is_group"
        )
        targets = {name for group, members in ledger.groups for name in (group, *members)}
        groups = {group for group, _ in ledger.groups}
        self._db.executemany(insert, [(name, ledger.step, name in groups) for name in targets])
        for some in in_parts({name.rpartition(".")[0] or name for name in targets}):  # rewards name episodes too
            marks = ",".join("?" * len(some))
            episodes = f"SELECT DISTINCT episode, ?, 0 FROM calls WHERE id IN ({marks})"
            self._db.execute(f"INSERT OR IGNORE INTO consumed {episodes}", [ledger.step, *some])
        self._any_closed = True

    def _write_counters(self, counted: Mapping[str, int]) -> None:
        if counted != self._saved:
            self._db.executemany(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                [(name, value - self._saved[name]) for name, value in counted.items()],
            )
