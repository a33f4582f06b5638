"""What the stores that speak SQL have in common: how records are read, queued and counted. `Store` documents each
method. Queries are in SQLite's dialect; a store of another kind translates them."""

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
Made = TypeVar("Made")
Reader = TypeVar("Reader", bound="Connection")

COUNTERS = ("lost", "refused", "foreign", "dropped", "sampled")
PAGE = 200
"""Episodes fetched per query, so that a slow reader holds no snapshot and a log can be folded back."""

_PATH = """
WITH RECURSIVE path (id) AS (
    SELECT id FROM segments WHERE id = ?
    UNION
    SELECT parent FROM path JOIN segments USING (id) WHERE parent IS NOT NULL)
SELECT id, parent, token_ids FROM path JOIN segments USING (id)"""


class Connection(Protocol):
    """What a pool of readers keeps."""

    def close(self) -> None: ...


class StoreFailure(RunError):
    """A transaction could not be committed, for a `reason`."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address} cannot be written: {reason}.", "Free the disk, or see that the server runs.")
        self.reason = reason


class SqlStore(Store, Generic[Reader]):
    """A `Store` over tables of SQL."""

    def __init__(
        self, address: str, connect: Callable[[], Reader], writer: Writer | None, lock: FileLock | None
    ) -> None:
        """`address` is for people; `connect` opens a connection that reads."""
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
        """Delete months as wholes, where the store has them apart, that `prune` would delete row by row."""
        yield from ()

    def figures(self) -> Figures:
        return Figures(self.rows, self._calls, self.address)

    def write(self, records: Sequence[Record]) -> None:
        self._the_writer().put(records)

    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        return self._the_writer().commit(records, counts)

    def _the_writer(self) -> Writer:
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
        chosen, asked = filters.where()
        where = chosen.replace("WHERE", " AND", 1)
        last = ""
        while True:
            sql = f"SELECT id, body, metrics FROM episodes WHERE id > ?{where} ORDER BY id LIMIT {PAGE}"
            page, before = self.rows(sql, (last, *asked)), last
            for last, *columns in page:  # noqa: B007
                yield from self._read(episode_from, columns)
            if len(page) < PAGE or last <= before:  # an id that is no text does not lead on
                return

    def calls(
        self, episode_id: str, *, start: int = 0, limit: int | None = None, lean: bool = False
    ) -> list[CallRecord]:
        last = (1 << 62) if limit is None else limit
        return self._calls("episode = ? ORDER BY step, id LIMIT ? OFFSET ?", (episode_id, last, start), lean)

    def _calls(self, where: str, parameters: Sequence[Any], lean: bool = False) -> list[CallRecord]:
        sql = f"SELECT body, candidates, {'NULL' if lean else 'token_ids'}, logprobs FROM calls WHERE {where}"
        return [call for row in self.rows(sql, parameters) for call in self._read(call_from, row)]

    def bodies(self, ids: Iterable[str]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for some in in_parts(set(ids)):
            sql = f"SELECT id, body FROM messages WHERE id IN ({','.join('?' * len(some))})"
            for id, text in self.rows(sql, some):
                for body in self._read(msgspec.json.decode, (text,)):
                    found[id] = join_images(body, self._image)
            for id in some:
                if id not in found and (data := self._image(id)) is not None:
                    found[id] = data
        return found

    def _image(self, id: str) -> bytes | None:
        """The bytes whose hash it is; None where they are not there, or were changed."""
        found = self.rows("SELECT data FROM images WHERE id = ?", (id,))
        data = found[0][0] if found else None
        return data if isinstance(data, bytes) and image_id(data) == id else None

    def token_ids(self, segment_id: str) -> tuple[int, ...]:
        return join_path(segment_id, self.rows(_PATH, (segment_id,)))

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        found: dict[str, dict[str, float]] = {target: {} for target in targets}
        for some in in_parts(found):
            sql = f"SELECT target, name, value FROM rewards WHERE target IN ({','.join('?' * len(some))})"
            for target, name, value in self.rows(sql, some):
                for number in self._read(_reward, (name, value)):
                    found.setdefault(target, {})[name] = number
        return found

    def feedback(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        texts: dict[str, dict[str, str]] = {target: {} for target in targets}
        for some in in_parts(texts):
            sql = f"SELECT target, name, text FROM {FEEDBACK} AND target IN ({','.join('?' * len(some))})"
            for target, name, value in self.rows(sql, some):
                for text in self._read(_text, (name, value)):
                    texts.setdefault(target, {})[name] = text
        return texts

    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        members = groups if isinstance(groups, Mapping) else dict.fromkeys(groups, ())
        listed = [(group, [*names]) for group, names in members.items()]
        self._write_ledger(lambda does: does.consume(listed, training_step))

    def release(self, training_step: int) -> None:
        self._write_ledger(lambda does: does.release(training_step))

    def _write_ledger(self, do: Callable[[Transactions], None]) -> None:
        try:
            self.act(do)
        except StoreFailure as error:
            raise RecordError(
                f"The ledger of consumed groups in {self.address} cannot be written ({error.reason}).",
                "Free the disk and resume: a group that is not in the ledger could be trained twice.",
            ) from None

    def act(self, do: Callable[[Transactions], T]) -> T:
        """Do something in a transaction of the writer's. Raises StoreFailure."""
        act = Act(do)
        if reason := self._the_writer().act(act):
            raise StoreFailure(self.address, reason)
        result: T = act.result
        return result

    def consumed(self) -> Mapping[str, int]:
        return ConsumedGroups(self.rows)

    def counters(self) -> Mapping[str, int]:
        found = dict.fromkeys(COUNTERS, 0)
        for name, value in self.rows("SELECT name, value FROM counters"):
            if (own := name.partition(" of ")[0]) in found:
                found[own] += value
        return found

    def pause(self) -> bool:
        """Flush, and let other processes write, without closing the store: until `resume` this one neither writes nor
        is asked to. Return whether that was possible; if not, close the store."""
        if self._writer is None or not self._writer.pause():
            return False
        if self._lock:
            self._lock.release()
        return True

    def resume(self) -> bool:
        """Write again after `pause`. Return whether the store is as this process left it; if not, close it and open it
        again. Raises RunError while another process writes."""
        # Before the lock is taken too: that would make a lock file where the records were removed.
        if self._writer is None or not self._writer.is_unchanged():
            return False
        if self._lock:
            self._lock.take()
        return self._writer.is_unchanged()

    def close(self) -> None:
        self._shut()

    @contextmanager
    def _reader(self) -> Iterator[Reader]:
        """A connection for this read alone: pooled, and never the writer's."""
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
        if self._shut.alive and len(self._readers) < 8:
            self._readers.append(db)
        else:
            db.close()

    def after_fork(self) -> None:
        """A child process may read with connections of its own; what is open belongs to the parent."""
        leave_open(*self._readers)  # to close one would tell the server
        self._readers.clear()
        if self._writer:
            self._writer.abandon()

    def _read(self, make: Callable[..., Made], columns: Sequence[Any]) -> Iterator[Made]:
        """The record that `make` makes of a row; nothing, and it is counted, where the row is broken."""
        try:
            made = make(*columns)
        except (ValueError, TypeError, struct.error, RecursionError) as error:
            self._unreadable += 1
            if self._unreadable == 1:
                log.warning("%s: a broken row is left out (%s), as are any others", self.address, type(error).__name__)
            return
        yield made


class ConsumedGroups(Mapping[str, int]):
    """Group id -> training step that consumed it. A lookup is one query by key, so that a step of a long run does not
    read the groups of all steps before it."""

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


def _reward(name: Any, value: Any) -> float:
    if not isinstance(name, str) or isinstance(value, str | bytes):
        raise TypeError("a reward is a number with a name")
    return float("nan") if value is None else value


def _text(name: Any, value: Any) -> str:
    if not isinstance(name, str) or not isinstance(value, str):
        raise TypeError("feedback is a text with a name")
    return value
