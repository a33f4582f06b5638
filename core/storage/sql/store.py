"""The common part of all stores that speak SQL: how records are read, queued and counted. `Store` documents each
method. Queries are in SQLite's dialect; other stores translate them."""

from __future__ import annotations

import logging
import struct
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from cotune.errors import RecordError, RunError
from cotune.records.images import image_id, join_images
from cotune.records.structs import CallRecord, Episode, Record
from cotune.runtime.forks import leave_open, survives_fork
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters
from cotune.storage.file_lock import FileLock
from cotune.storage.protocol import Store, StoreHealth
from cotune.storage.schema import FEEDBACK, Row, call_from, episode_from, in_parts, join_path
from cotune.storage.sql.figures import Figures
from cotune.storage.sql.transaction import Transactions
from cotune.storage.sql.writer import Act, Writer

log = logging.getLogger("cotune.store")
T = TypeVar("T")
Value = TypeVar("Value")
Reader = TypeVar("Reader", bound="Connection")

COUNTERS = ("lost", "refused", "foreign", "dropped", "sampled")
PAGE = 200
"""Episodes fetched per query. Small pages, so that a slow reader does not hold a snapshot, which would keep SQLite from
moving its log into the file."""

_IDLE_READERS = 8
"""Maximum number of connections that stay open for later reads."""

_PATH = """
WITH RECURSIVE path (id) AS (
    SELECT id FROM segments WHERE id = ?
    UNION
    SELECT parent FROM path JOIN segments USING (id) WHERE parent IS NOT NULL)
SELECT id, parent, token_ids FROM path JOIN segments USING (id)"""


class Connection(Protocol):
    """A connection of the pool of readers."""

    def close(self) -> None: ...


class StoreFailure(RunError):
    """A transaction could not be committed, for a `reason`."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address} cannot be written: {reason}.", "Free some space, or check that the server runs.")
        self.reason = reason


class SqlStore(Store, Generic[Reader]):
    """A `Store` over tables of SQL."""

    def __init__(
        self, address: str, connect: Callable[[], Reader], writer: Writer | None, lock: FileLock | None
    ) -> None:
        """`address` names the store in messages, and `connect` opens a connection that reads. `writer` and `lock` are
        None for a store that is open for reading only."""
        self.address = address
        self._writer = writer
        self._lock = lock
        self._connect = connect
        self._readers: list[Reader] = []
        self._unreadable = 0
        self._shut = weakref.finalize(self, _shut, writer, self._readers, lock)
        survives_fork(self)

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Rows of any SELECT in SQLite's dialect, on a connection that cannot write."""

    def drop_months(self, before: float, app: str, keep_trained: bool) -> Iterator[Mapping[str, int]]:
        """Delete whole months at once that `prune` would otherwise delete row by row, if the store separates months."""
        yield from ()

    def figures(self) -> Figures:
        return Figures(self.rows, self._calls, self.address)

    def write(self, records: Sequence[Record]) -> None:
        self._writer_or_error().put(records)

    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        return self._writer_or_error().commit(records, counts)

    def _writer_or_error(self) -> Writer:
        if self._writer is None:
            raise RunError(f"{self.address} is open for reading only.", "Open it without read_only to write.")
        return self._writer

    def flush(self) -> None:
        if self._writer:
            self._writer.flush()

    @property
    def health(self) -> StoreHealth:
        if self._writer is None:
            return StoreHealth(unreadable=self._unreadable)
        writer = self._writer
        return StoreHealth(writer.failing, writer.lost, self._unreadable, writer.refused, writer.foreign)

    def episodes(self, filters: EpisodeFilters = EVERYTHING) -> Iterator[Episode]:
        """The episodes that match, in the order of their ids. They are read in pages, so that the store may be written
        between two of them."""
        where, parameters = filters.where()
        more_conditions = where.replace("WHERE", " AND", 1)
        last_id = ""
        while True:
            sql = f"SELECT id, body, metrics FROM episodes WHERE id > ?{more_conditions} ORDER BY id LIMIT {PAGE}"
            page = self.rows(sql, (last_id, *parameters))
            previous_id = last_id
            if page:
                last_id = page[-1][0]
            yield from self._decode_rows(episode_from, [columns for _, *columns in page])
            # A broken id that is not text would repeat the page forever.
            if len(page) < PAGE or last_id <= previous_id:
                return

    def calls(
        self, episode_id: str, *, start: int = 0, limit: int | None = None, lean: bool = False
    ) -> list[CallRecord]:
        last = (1 << 62) if limit is None else limit
        return self._calls("episode = ? ORDER BY step, id LIMIT ? OFFSET ?", (episode_id, last, start), lean)

    def _calls(self, where: str, parameters: Sequence[Any], lean: bool = False) -> list[CallRecord]:
        sql = f"SELECT body, candidates, {'NULL' if lean else 'token_ids'}, logprobs FROM calls WHERE {where}"
        return self._decode_rows(call_from, self.rows(sql, parameters))

    def bodies(self, ids: Iterable[str]) -> Mapping[str, Any]:
        """The contents of messages and the bytes of images, by id, read in few queries. Missing ids are left out."""
        contents: dict[str, Any] = {}
        for some_ids in in_parts(set(ids)):
            sql = f"SELECT id, body FROM messages WHERE id IN ({','.join('?' * len(some_ids))})"
            for id, body in self._decode_rows(_decode_body, self.rows(sql, some_ids)):
                contents[id] = join_images(body, self._image)
            # The other ids are of images, which have a table of their own, or are missing.
            for id in some_ids:
                if id not in contents and (data := self._image(id)) is not None:
                    contents[id] = data
        return contents

    def _image(self, id: str) -> bytes | None:
        """The bytes of an image, whose hash is the id; None if they are missing or were changed."""
        rows = self.rows("SELECT data FROM images WHERE id = ?", (id,))
        data = rows[0][0] if rows else None
        return data if isinstance(data, bytes) and image_id(data) == id else None

    def token_ids(self, segment_id: str) -> tuple[int, ...]:
        return join_path(segment_id, self.rows(_PATH, (segment_id,)))

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        """Rewards by target and name. Targets without rewards have an empty entry."""
        rewards: dict[str, dict[str, float]] = {target: {} for target in targets}
        for part in in_parts(rewards):
            sql = f"SELECT target, name, value FROM rewards WHERE target IN ({','.join('?' * len(part))})"
            for target, name, number in self._decode_rows(_decode_reward, self.rows(sql, part)):
                rewards.setdefault(target, {})[name] = number
        return rewards

    def feedback(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        """Feedback texts by target and name. Targets without texts have an empty entry."""
        texts: dict[str, dict[str, str]] = {target: {} for target in targets}
        for part in in_parts(texts):
            marks = ",".join("?" * len(part))
            # `FEEDBACK` ends with a condition: it leaves out texts whose reward was replaced later.
            sql = f"SELECT target, name, text FROM {FEEDBACK} AND target IN ({marks})"
            for target, name, text in self._decode_rows(_decode_feedback, self.rows(sql, part)):
                texts.setdefault(target, {})[name] = text
        return texts

    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        members = groups if isinstance(groups, Mapping) else dict.fromkeys(groups, ())
        listed = [(group, [*names]) for group, names in members.items()]
        self._write_ledger(lambda transaction: transaction.consume(listed, training_step))

    def release(self, training_step: int) -> None:
        self._write_ledger(lambda transaction: transaction.release(training_step))

    def _write_ledger(self, do: Callable[[Transactions], None]) -> None:
        """Write to the ledger of the groups that were trained on, and wait for the commit. Raises RecordError if it
        fails, because the run must then stop, unlike after a lost record."""
        try:
            self.act(do)
        except StoreFailure as error:
            raise RecordError(
                f"The ledger of consumed groups in {self.address} cannot be written ({error.reason}).",
                "Free some space and resume: a group that is not in the ledger could be trained twice.",
            ) from None

    def act(self, do: Callable[[Transactions], T]) -> T:
        """Run `do` in a transaction of the writer and return its result. Raises StoreFailure."""
        act = Act(do)
        if reason := self._writer_or_error().act(act):
            raise StoreFailure(self.address, reason)
        result: T = act.result
        return result

    def consumed(self) -> Mapping[str, int]:
        return ConsumedGroups(self.rows)

    def counters(self) -> Mapping[str, int]:
        totals = dict.fromkeys(COUNTERS, 0)
        for name, value in self.rows("SELECT name, value FROM counters"):
            counter = name.partition(" of ")[0]  # "lost of ...": copied from another store
            if counter in totals:
                totals[counter] += value
        return totals

    def pause(self) -> bool:
        """Commit everything, and allow other processes to write while this store stays open. Do not write to it until
        `resume` has returned True.

        Returns whether this was possible. If not, close the store."""
        if self._writer is None or not self._writer.pause():
            return False
        if self._lock:
            self._lock.release()
        return True

    def resume(self) -> bool:
        """Allow writing to this store again after `pause`. Returns whether that is possible: no other process has
        changed it meanwhile. If not, close it and open it again. Raises RunError while another process writes."""
        # Checked before the lock too: taking it would create a lock file even if the records were removed.
        if self._writer is None or not self._writer.is_unchanged():
            return False
        if self._lock:
            self._lock.take()
        return self._writer.is_unchanged()

    def close(self) -> None:
        self._shut()

    @contextmanager
    def _reader(self) -> Iterator[Reader]:
        """A block with a connection for one read, from a pool. It is never the connection of the writer."""
        if not self._shut.alive:
            raise RunError(f"The store {self.address} is closed.", "Open it again to read.")
        try:
            db = self._readers.pop()
        except IndexError:
            db = self._connect()
        try:
            yield db
        except BaseException:
            db.close()
            raise
        if self._shut.alive and len(self._readers) < _IDLE_READERS:
            self._readers.append(db)
        else:
            db.close()

    def after_fork(self) -> None:
        """In a forked child: forget the open connections, which belong to the parent. The child may read with new
        ones."""
        leave_open(*self._readers)  # closing one would end the parent's session on the server
        self._readers.clear()
        if self._writer:
            self._writer.abandon()

    def _decode_rows(self, decode: Callable[..., Value], rows: Iterable[Sequence[Any]]) -> list[Value]:
        """The records that `decode` makes from the columns of each row. Broken rows are left out and counted."""
        records: list[Value] = []
        for columns in rows:
            try:
                records.append(decode(*columns))
            except (ValueError, TypeError, struct.error, RecursionError) as error:
                self._unreadable += 1
                if self._unreadable == 1:
                    kind = type(error).__name__
                    log.warning("%s: a broken row is left out (%s), as are any others", self.address, kind)
        return records


class ConsumedGroups(Mapping[str, int]):
    """Group id -> training step that consumed it. A lookup is one query by key, so that a long run does not read the
    groups of all its steps."""

    def __init__(self, rows: Callable[[str, Sequence[Any]], list[Any]]) -> None:
        self._rows = rows

    def __getitem__(self, group: str) -> int:
        for (step,) in self._rows("SELECT training_step FROM consumed WHERE is_group = 1 AND target = ?", [group]):
            return int(step)
        raise KeyError(group)

    def __iter__(self) -> Iterator[str]:
        return (group for (group,) in self._rows("SELECT target FROM consumed WHERE is_group = 1", []))

    def __len__(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM consumed WHERE is_group = 1", [])[0][0])


def _shut(writer: Writer | None, readers: list[Any], lock: FileLock | None) -> None:
    while readers:  # before the writer: an open reader would keep the log from being folded into the file
        readers.pop().close()
    if writer:
        writer.close()
    if lock:
        lock.release()


def _decode_body(id: Any, text: Any) -> tuple[str, Any]:
    return id, msgspec.json.decode(text)


def _decode_reward(target: Any, name: Any, value: Any) -> tuple[str, str, float]:
    if not isinstance(name, str) or isinstance(value, str | bytes):
        raise TypeError("a reward is a number with a name")
    return target, name, float("nan") if value is None else value


def _decode_feedback(target: Any, name: Any, value: Any) -> tuple[str, str, str]:
    if not isinstance(name, str) or not isinstance(value, str):
        raise TypeError("feedback is a text with a name")
    return target, name, value
