"""What a process writes to a store: a bounded queue, a thread, and transactions of many records."""

from __future__ import annotations

import logging
import math
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotune.errors import RunError
from cotune.records.structs import Record
from cotune.records.wire import storable_record
from cotune.storage.schema import DAY, WIDTHS, encode
from cotune.storage.sql.transaction import Database, RowKey, Transactions, row_key

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
RETRY = (0.05, 2.0)
"""First and longest pause in seconds before a failed transaction is tried again."""

_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, struct.error)
"""Raised for a record that no row can hold, such as one with a number that float32 lacks."""
_STOPPED = "the thread that writes has ended"


class Batch:
    """Rows that are committed together: the values of each table's rows, one after another.

    So a record leaves few objects behind: each costs again when the writer's thread, on another core, reads it.
    """

    __slots__ = ("bytes", "count", "counts", "failure", "kept", "left_out", "puts", "since", "tables")

    def __init__(self) -> None:
        self.tables: dict[str, list[Any]] = {table: [] for table in WIDTHS}
        self.count = self.bytes = self.puts = 0
        self.kept = 0
        """Those of its records that their sender keeps until they are committed."""
        self.counts: Counter[str] = Counter()
        """What is added to the counters of the store with it."""
        self.since = time.monotonic()
        self.failure: str | None = _STOPPED
        """After `flush`: why it could not be written."""
        self.left_out: Mapping[RowKey, str] = {}
        """After `flush`: rows that were left out, and the counter that counts them."""


class Act:
    """Something to do in a transaction of its own, after everything queued before. After `flush`, `result` is what it
    returned, or `failure` why it could not be done."""

    count, kept, bytes, puts = 0, 0, 400, 1

    def __init__(self, do: Callable[[Transactions], Any]) -> None:
        self.do = do
        self.result: Any = None
        self.since = time.monotonic()
        self.failure: str | None = _STOPPED


class Writer:
    """Takes records from any thread and commits them in order. `put` neither raises nor waits for the disk."""

    def __init__(self, database: Database) -> None:
        """Own `database` from now on."""
        self._db = database
        self._known: set[str] = set()
        """Content addresses known to be stored, since `_known_since`; none where other processes may delete them."""
        self._known_since = time.monotonic()
        self._queue: deque[Batch | Act] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._records = self._bytes = 0
        self._queued = self._done = self._urgent = 0
        self._since = math.inf
        self._idle = self._closing = self._failing = self._stalled = self._forked = False
        self._reported: set[str] = set()
        self._counted = {"lost": 0, "refused": 0, "foreign": 0}
        self._saved = dict(self._counted)
        try:
            self._does = Transactions(database, self._report, self._known.clear)
        except BaseException:
            database.close()
            raise
        self._thread = threading.Thread(target=self._run, name="cotune-store", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        """Whether the last transaction failed, and is tried again."""
        return self._failing

    @property
    def lost(self) -> int:
        """Records dropped since the store was opened."""
        return self._counted["lost"]

    @property
    def refused(self) -> int:
        """Rewards that came after their group was consumed, since the store was opened."""
        return self._counted["refused"]

    @property
    def foreign(self) -> int:
        """Records for episodes of other applications, left out since the store was opened."""
        return self._counted["foreign"]

    def put(self, records: Sequence[Record]) -> None:
        """Encode and queue records; those that cannot be queued are counted in `lost`."""
        _, refusal = self._queued_in(records)
        if refusal:
            self._lose(len(records), refusal)

    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        """Encode and queue records, and return when they are durable, with what they add to the counters of the store.
        Return those that were left out, by the counter that counts them. Raises RunError if they could not be
        stored."""
        batch, refusal = self._queued_in(records, counts, kept=True)
        if batch is None and refusal is None:
            # At least one of them cannot be encoded: the others are committed together.
            broken: list[Record] = []
            others: list[Record] = []
            for record in records:
                if self._is_encodable(record):
                    others.append(record)
                else:
                    broken.append(record)
            left_out = dict(self.commit(others, counts)) if others or counts else {}
            left_out["lost"] = [*left_out.get("lost", ()), *broken]
            return left_out
        if refusal is None:
            self.flush()
            refusal = batch.failure if batch else None
        if refusal:
            cause = f"{self._db.name} did not take {len(records)} records: {refusal}."
            raise RunError(cause, "Send them again: what is stored is not stored twice.")
        return _left_out(records, batch.left_out if batch else {})

    def _is_encodable(self, record: Record) -> bool:
        """Whether rows can be made of a record, which is counted as lost where not."""
        try:
            encode([storable_record(record)], ())
        except _UNENCODABLE as error:
            self._lose(1, "a record cannot be encoded", error)
            return False
        return True

    def _queued_in(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None, kept: bool = False
    ) -> tuple[Batch | None, str | None]:
        """The batch that holds these records now, None where they cannot be encoded; or why they cannot be queued."""
        known = () if self._db.shared else self._known
        try:
            try:
                rows, size = encode(records, known)
            except _UNENCODABLE:  # rare, so only now is every value looked at
                rows, size = encode(list(map(storable_record, records)), known)
        except _UNENCODABLE as error:
            if not kept:  # `commit` looks at them one by one
                self._lose(len(records), "a record cannot be encoded", error)
            return None, None
        batch = None
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                last = self._queue[-1] if self._queue else None
                if isinstance(last, Batch) and last.count < BATCH_RECORDS:
                    batch = last
                else:
                    batch = Batch()
                    self._queue.append(batch)
                for table, row in rows:
                    batch.tables[table].extend(row)
                batch.counts.update(counts or {})
                batch.count += len(records)
                batch.kept += len(records) if kept else 0
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
        return batch, refusal

    def act(self, act: Act) -> str | None:
        """Do it after everything queued; return why that failed, or None."""
        with self._changed:
            if refusal := self._refusal(full=False):
                return refusal
            self._queue.append(act)
            self._queued += 1
            self._bytes += act.bytes
        self.flush()
        return act.failure

    def flush(self) -> None:
        """Wait until everything queued so far is committed or counted as lost."""
        with self._changed:
            target = self._queued
            self._urgent = max(self._urgent, target)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= target or not self._thread.is_alive())

    def pause(self) -> bool:
        """Commit the queue, and leave the database to other writers for a while. Return whether all is committed.
        Nothing is put until `is_unchanged` has returned True."""
        if self._closing:
            return False
        self.flush()
        if self._failing or self._counted != self._saved:
            return False  # `close` makes one more attempt
        for text in self._db.pause():  # the writer's thread waits for its queue, and leaves the connection alone
            self._report(text)
        return True

    def is_unchanged(self) -> bool:
        """Whether no other writer has changed the database since `pause`, so that what this one knows of it is true."""
        return self._db.is_unchanged()

    def close(self) -> None:
        """Commit the queue and close the connection; safe to call twice."""
        if self._forked:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for text in self._db.close():
            self._report(text)

    def abandon(self) -> None:
        """In a forked child: take nothing any more, and leave the parent's connection alone."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._forked = self._closing = True

    def _refusal(self, full: bool = True) -> str | None:
        """Why nothing can be queued, after one wait for room; None where it can. An act may overfill the queue."""
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

    def _take(self) -> Batch | Act | None:
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

    def _settle(self, taken: Batch | Act) -> None:
        """Commit. Trouble with the disk is waited out, unless someone waits for the result."""
        pause, last = RETRY[0], False
        while True:
            try:
                self._commit(taken)
            except self._db.trouble as error:
                self._report("the store cannot be written", error)
                if last:
                    self._give_up(taken, error)
                    return
                last = self._pause(pause)
                pause = min(2 * pause, RETRY[1])
            except Exception as error:  # noqa: BLE001  the thread must go on, as others wait for it
                self._give_up(taken, error)
                return
            else:
                taken.failure = None
                self._failing = False
                return

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; True when someone waits, so that it must be the last one."""
        with self._changed:
            self._failing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._closing or self._urgent > self._done, seconds)

    def _give_up(self, taken: Batch | Act, error: Exception) -> None:
        taken.failure = str(error) or type(error).__name__
        self._lose(taken.count - taken.kept, "records cannot be stored", error)

    def _lose(self, count: int, cause: str, error: Exception | None = None) -> None:
        with self._changed:
            self._counted["lost"] += count
        self._report(cause, error)

    def _report(self, cause: str, error: Exception | None = None) -> None:
        """Log each cause once; the counters hold how often it occurred."""
        if cause not in self._reported:
            self._reported.add(cause)
            log.error("%s: %s%s", self._db.name, cause, f" ({error})" if error else "")

    def _commit(self, taken: Batch | Act) -> None:
        """One transaction. Addresses count as known, rewards as refused and rows as lost, only after it."""
        counted, added = dict(self._counted), dict.fromkeys(self._counted, 0)
        try:
            self._db.begin()
            if isinstance(taken, Batch):
                written = self._does.write_rows(taken.tables)
                taken.left_out = written.left_out
                added = written.counted
                self._does.count(taken.counts)
            else:
                taken.result = taken.do(self._does)
            counted = {name: value + added[name] for name, value in counted.items()}
            if counted != self._saved:
                self._does.count({name: value - self._saved[name] for name, value in counted.items()})
            self._db.commit()
        except BaseException:
            self._db.rollback()
            self._does.any_closed = True
            raise
        self._saved = counted
        with self._changed:
            for name, count in added.items():
                self._counted[name] += count
        if isinstance(taken, Batch) and not added["lost"] and not self._db.shared:
            if len(self._known) > RECENT_IDS or time.monotonic() - self._known_since > DAY:
                self._known.clear()
                self._known_since = time.monotonic()
            for table in ("images", "messages", "segments"):
                self._known.update(taken.tables[table][:: WIDTHS[table]])
        if added["refused"]:
            self._report("a reward came after its group was consumed and is refused")
        if added["foreign"]:
            self._report("a record for an episode of another application is left out")


def _left_out(records: Sequence[Record], reasons: Mapping[RowKey, str]) -> dict[str, list[Record]]:
    """Those of some records whose rows were left out, by the reason."""
    left_out: dict[str, list[Record]] = {}
    for record in records if reasons else ():
        rows, _ = encode([storable_record(record)], ())
        table, row = rows[-1]  # a message comes after its images
        if reason := reasons.get(row_key(table, row)):
            left_out.setdefault(reason, []).append(record)
    return left_out
