"""The writer of a store: a bounded queue, a thread, and transactions of many records."""

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
from cotune.storage.schema import DAY, WIDTHS, Row, encode
from cotune.storage.sql.transaction import Database, RowKey, Transactions, row_key

log = logging.getLogger("cotune.store")

BATCH_RECORDS = 4000
"""Number of records that are committed at once without waiting for more; later ones begin another transaction."""
LINGER = 0.2
"""Seconds that a record waits for others to share its transaction."""
LATE = 0.23
YIELD = 0.002
"""Age in seconds of an uncommitted record that makes `put` pause, and the seconds of one pause. A busy application
releases the interpreter lock only for microseconds, which could starve the writer's thread."""
QUEUE_BYTES = 14 << 20
"""Maximum size of the queue in memory."""
PUT_TIMEOUT = 5.0
"""Seconds that `put` waits for room in a full queue. While the disk fails, or after a time-out until there is room
again, it drops the records at once."""
RECENT_IDS = 32768
"""Maximum number of content addresses remembered as stored. With more, all are forgotten; then some rows are written
again, which changes nothing."""
RETRY = (0.05, 2.0)
"""First and longest pause in seconds before a failed transaction is tried again."""

_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, struct.error)
"""Exceptions for a record that no row can hold, for example with a number outside the range of float32."""
_STOPPED = "the thread that writes has ended"


class Batch:
    """Rows that are committed together: the values of each table's rows, one after another.

    Flat lists, so that a record consists of few objects: each costs time again when the writer's thread, on another
    core, reads it.
    """

    __slots__ = ("bytes", "count", "counts", "failure", "left_out", "puts", "retained", "since", "tables")

    def __init__(self) -> None:
        """An empty batch. It takes the records that share one transaction."""
        self.tables: dict[str, list[Any]] = {table: [] for table in WIDTHS}
        self.count = 0
        """Number of its records."""
        self.bytes = 0
        """Estimated size of its rows."""
        self.puts = 0
        """Number of calls of `put` and `commit` whose records are in it."""
        self.retained = 0
        """Number of its records that the sender retains until they are committed: these cannot be lost."""
        self.counts: Counter[str] = Counter()
        """Numbers to add to the counters of the store in the same transaction."""
        self.since = time.monotonic()
        """When it was begun."""
        self.failure: str | None = _STOPPED
        """After `flush`: why it could not be written; None if it was."""
        self.left_out: Mapping[RowKey, str] = {}
        """After `flush`: rows that were left out, each with the name of its counter."""


class Act:
    """A function to run in a separate transaction, after everything queued before. After `flush`, `result` is its
    return value, or `failure` the reason why it failed."""

    count = 0
    retained = 0
    bytes = 400
    puts = 1

    def __init__(self, do: Callable[[Transactions], Any]) -> None:
        self.do = do
        self.result: Any = None
        self.since = time.monotonic()
        self.failure: str | None = _STOPPED


class Writer:
    """Takes records from any thread and commits them in order. `put` neither raises nor waits for the disk."""

    def __init__(self, database: Database) -> None:
        """Write to `database`, which nobody else may use from now on."""
        self._db = database
        self._stored_ids: set[str] = set()
        """Content addresses known to be stored, collected since `_stored_ids_since`. Empty if other processes may
        delete them."""
        self._stored_ids_since = time.monotonic()
        self._queue: deque[Batch | Act] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._records = 0
        """Number of records in the queue."""
        self._bytes = 0
        """Size of the queue, with the batch that is being committed."""
        self._queued = 0
        """Number of calls of `put`, `commit` and `act` that were queued."""
        self._done = 0
        """Number of these that are committed or counted as lost."""
        self._urgent = 0
        """The number up to which somebody waits for `_done`."""
        self._since = math.inf
        """When the oldest batch of the queue was begun."""
        self._idle = False
        """Whether the thread waits for records."""
        self._closing = False
        self._failing = False
        """Whether the last transaction failed and is being tried again."""
        self._stalled = False
        """Whether the queue stayed full for `PUT_TIMEOUT`."""
        self._forked = False
        self._reported: set[str] = set()
        """Causes of trouble that were logged."""
        self._counted = {"lost": 0, "refused": 0, "foreign": 0}
        """Records that were left out since the store was opened."""
        self._saved = dict(self._counted)
        """The part of `_counted` that is in the store's counters."""
        try:
            self._transactions = Transactions(database, self._report, self._stored_ids.clear)
        except BaseException:
            database.close()
            raise
        self._thread = threading.Thread(target=self._run, name="cotune-store", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        """Whether the last transaction failed and is being tried again."""
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
        try:
            rows, size = self._encode(records)
        except _UNENCODABLE as error:
            self._lose(len(records), "a record cannot be encoded", error)
            return
        queued = self._enqueue(rows, size, len(records))
        if isinstance(queued, str):  # the reason why the queue takes nothing
            self._lose(len(records), queued)

    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        """Encode and queue records, add `counts` to the counters of the store, and return when both are durable.

        Returns the records that were left out, by the name of their counter. Raises RunError if they could not be
        stored."""
        try:
            rows, size = self._encode(records)
        except _UNENCODABLE:
            # At least one record cannot be encoded. The others are committed together.
            broken: list[Record] = []
            valid: list[Record] = []
            for record in records:
                if self._is_encodable(record):
                    valid.append(record)
                else:
                    broken.append(record)
            left_out: dict[str, Sequence[Record]] = {}
            if valid or counts:
                left_out.update(self.commit(valid, counts))
            left_out["lost"] = [*left_out.get("lost", ()), *broken]
            return left_out

        queued = self._enqueue(rows, size, len(records), counts, retained=True)
        if isinstance(queued, str):  # the reason why the queue takes nothing
            failure: str | None = queued
        else:
            self.flush()
            failure = queued.failure
        if isinstance(queued, str) or failure is not None:
            cause = f"{self._db.name} did not take {len(records)} records: {failure}."
            raise RunError(cause, "Send them again: the store never keeps a record twice.")
        return _left_out(records, queued.left_out)

    def _is_encodable(self, record: Record) -> bool:
        """Whether a record can be encoded as rows. If not, it is counted as lost."""
        try:
            encode([storable_record(record)], ())
        except _UNENCODABLE as error:
            self._lose(1, "a record cannot be encoded", error)
            return False
        return True

    def _encode(self, records: Sequence[Record]) -> tuple[list[tuple[str, Row]], int]:
        """Rows of records, each with the name of its table, and their size in bytes. Raises `_UNENCODABLE`."""
        stored_ids = () if self._db.shared else self._stored_ids
        try:
            return encode(records, stored_ids)
        except _UNENCODABLE:  # rare, so values that no row can hold are replaced only now
            return encode(list(map(storable_record, records)), stored_ids)

    def _enqueue(
        self,
        rows: Sequence[tuple[str, Row]],
        size: int,
        n_records: int,
        counts: Mapping[str, int] | None = None,
        retained: bool = False,
    ) -> Batch | str:
        """Add rows to the last batch of the queue, or to a new one. For the other arguments see `commit` and
        `Batch.retained`.

        Returns the batch, or a text with the reason why the queue takes nothing now.
        """
        with self._lock:
            refusal = self._refusal()
            if refusal is not None:
                return refusal
            last = self._queue[-1] if self._queue else None
            if isinstance(last, Batch) and last.count < BATCH_RECORDS:
                batch = last
            else:
                batch = Batch()
                self._queue.append(batch)
            for table, row in rows:
                batch.tables[table].extend(row)
            batch.counts.update(counts or {})
            batch.count += n_records
            if retained:
                batch.retained += n_records
            batch.bytes += size
            batch.puts += 1
            self._records += n_records
            self._bytes += size
            self._queued += 1
            self._since = min(self._since, batch.since)
            if self._idle or self._records >= BATCH_RECORDS:
                self._changed.notify_all()
            if time.monotonic() - self._since > LATE and not self._failing:
                self._changed.wait(YIELD)  # gives the writer's thread a turn, see LATE
        return batch

    def act(self, act: Act) -> str | None:
        """Run an act, a change of the store by a function, after everything that is queued, and wait for it.

        Returns the reason if it failed, or None.
        """
        with self._changed:
            # An act takes almost no memory, so it may be queued even if the queue is full.
            refusal = self._refusal(may_overfill=True)
            if refusal is not None:
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
        """Commit the queue and leave the database to other writers for a while. Returns False if some records or counts
        could not be committed. Put nothing until `is_unchanged` has returned True."""
        if self._closing:
            return False
        self.flush()
        has_unsaved_counts = self._counted != self._saved
        if self._failing or has_unsaved_counts:
            return False  # `close` makes one more attempt
        for text in self._db.pause():  # safe: the writer's thread waits for its queue and does not use the connection
            self._report(text)
        return True

    def is_unchanged(self) -> bool:
        """Whether no other writer has changed the database since `pause`, so that this writer's memory of it is
        right."""
        return self._db.is_unchanged()

    def close(self) -> None:
        """Commit the queue and close the connection; safe to call twice."""
        if self._forked:  # the connection and the thread are the parent's
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
        """In a forked child: refuse all records and do not touch the parent's connection."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._forked = self._closing = True

    def _refusal(self, *, may_overfill: bool = False) -> str | None:
        """The reason why nothing can be queued now; None if something can. If the queue is full, wait for room, up to
        `PUT_TIMEOUT`. With `may_overfill`, a queue that stays full is no reason.
        """
        # A call of the application may wait here. So nobody waits while the disk fails. After one wait without success,
        # nobody waits until there is room again.
        may_wait = not self._failing and not self._stalled
        if self._bytes > QUEUE_BYTES and may_wait:
            has_room = self._changed.wait_for(lambda: self._bytes <= QUEUE_BYTES or self._failing, PUT_TIMEOUT)
            self._stalled = not has_room
        if self._forked:
            return "the store was opened by the parent process"
        if self._closing:
            return "the store is closed"
        if self._bytes > QUEUE_BYTES and not may_overfill:
            return "the queue is full, the disk is too slow or cannot be written"
        self._stalled = False
        return None

    def _run(self) -> None:
        """The main function of the writer's thread.

        It commits batches of records, and acts (functions that change the store), in the order of the queue. It ends
        when the writer is closed and the queue is empty.
        """
        while (work := self._take()) is not None:
            self._commit_or_give_up(work)
            with self._changed:
                self._done += work.puts
                self._bytes -= work.bytes
                # `put` decides by the age of the queue whether the writer is late.
                self._since = self._queue[0].since if self._queue else math.inf
                self._changed.notify_all()
        # Counters may have changed after the last batch: save them with an empty one.
        if self._counted != self._saved:
            self._commit_or_give_up(Batch())

    def _take(self) -> Batch | Act | None:
        """Take the next batch or act from the queue. Returns None when the writer is closed and the queue is empty.

        A batch waits up to `LINGER` seconds for more records, which share its transaction.
        """

        def must_begin() -> bool:
            is_awaited = self._urgent > self._done  # somebody waits in `flush`
            return self._records >= BATCH_RECORDS or self._closing or is_awaited

        with self._changed:
            self._idle = True  # now `put` wakes this thread at the first record, otherwise only when many wait
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._idle = False
            self._changed.wait_for(must_begin, LINGER)
            if not self._queue:
                return None
            work = self._queue.popleft()
            self._records -= work.count
            return work

    def _commit_or_give_up(self, work: Batch | Act) -> None:
        """Commit a batch or act. If the disk or the server fails, wait and try again.

        If somebody waits for the result, there is only one more attempt. Other errors are final at once.
        """
        first_pause, longest_pause = RETRY
        pause = first_pause
        is_last_attempt = False
        while True:
            try:
                self._commit(work)
            except self._db.trouble as error:
                self._report("the store cannot be written", error)
                if is_last_attempt:
                    self._give_up(work, error)
                    return
                somebody_waits = self._wait_before_retry(pause)
                is_last_attempt = somebody_waits
                pause = min(2 * pause, longest_pause)
            except Exception as error:  # noqa: BLE001  this thread must continue, as others wait for it
                self._give_up(work, error)
                return
            else:
                work.failure = None
                self._failing = False
                return

    def _wait_before_retry(self, seconds: float) -> bool:
        """Wait before the next attempt. Returns early, with True, if somebody waits for the result."""
        with self._changed:
            self._failing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._closing or self._urgent > self._done, seconds)

    def _give_up(self, work: Batch | Act, error: Exception) -> None:
        """Leave out work that cannot be committed. Records that their sender retains are not lost."""
        work.failure = str(error) or type(error).__name__
        self._lose(work.count - work.retained, "records cannot be stored", error)

    def _lose(self, count: int, cause: str, error: Exception | None = None) -> None:
        """Count lost records and log the cause."""
        with self._changed:
            self._counted["lost"] += count
        self._report(cause, error)

    def _report(self, cause: str, error: Exception | None = None) -> None:
        """Log each cause once. The counters tell how often it occurred."""
        if cause not in self._reported:
            self._reported.add(cause)
            log.error("%s: %s%s", self._db.name, cause, f" ({error})" if error else "")

    def _commit(self, work: Batch | Act) -> None:
        """Run one transaction: the rows of a batch or the function of an act, and the counters of the store.

        What the writer remembers of the store is updated only after the commit.
        """
        totals = dict(self._counted)  # a copy: other threads may count lost records meanwhile
        n_left_out = dict.fromkeys(totals, 0)  # by this transaction
        try:
            self._db.begin()
            if isinstance(work, Batch):
                written = self._transactions.write_rows(work.tables)
                work.left_out = written.left_out
                n_left_out = written.counted
                self._transactions.count(work.counts)
            else:
                work.result = work.do(self._transactions)
            for name, n in n_left_out.items():
                totals[name] += n
            if totals != self._saved:
                self._transactions.count({name: total - self._saved[name] for name, total in totals.items()})
            self._db.commit()
        except BaseException:
            self._db.rollback()
            self._transactions.may_have_consumed = True  # unknown after a failure, and True only costs a search
            raise
        self._saved = totals
        with self._changed:
            for name, n in n_left_out.items():
                self._counted[name] += n
        # In a database that other processes write too, these rows may be deleted at any time.
        if isinstance(work, Batch) and not n_left_out["lost"] and not self._db.shared:
            self._remember_stored_ids(work)
        if n_left_out["refused"]:
            self._report("a reward came after its group was consumed and is refused")
        if n_left_out["foreign"]:
            self._report("a record for an episode of another application is left out")

    def _remember_stored_ids(self, batch: Batch) -> None:
        """Remember the content addresses of a committed batch, so that later batches leave these rows out.

        They are forgotten after a day. Then rows that are still used are written again, which marks them as used.
        """
        if len(self._stored_ids) > RECENT_IDS or time.monotonic() - self._stored_ids_since > DAY:
            self._stored_ids.clear()
            self._stored_ids_since = time.monotonic()
        for table in ("images", "messages", "segments"):
            ids = batch.tables[table][:: WIDTHS[table]]  # the first value of each row
            self._stored_ids.update(ids)


def _left_out(records: Sequence[Record], reasons: Mapping[RowKey, str]) -> dict[str, list[Record]]:
    """The records whose rows were left out of a transaction, by the reason. `reasons` has the reason for each such
    row."""
    left_out: dict[str, list[Record]] = {}
    if not reasons:
        return left_out
    for record in records:
        rows, _ = encode([storable_record(record)], ())
        table, row = rows[-1]  # a message comes after its images
        if reason := reasons.get(row_key(table, row)):
            left_out.setdefault(reason, []).append(record)
    return left_out
