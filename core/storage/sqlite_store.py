"""The embedded store: one SQLite file in WAL mode. One process writes, any number of threads and processes read."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from cotune.errors import RecordError, RunError
from cotune.records.images import image_id, join_images
from cotune.records.structs import CallRecord, Episode, Record
from cotune.runtime.forks import survives_fork
from cotune.storage.damage import forgiving, is_file_error, is_value_error, unusable
from cotune.storage.file_lock import FileLock
from cotune.storage.run_layout import RECORDS
from cotune.storage.schema import (
    APPLICATION,
    COLUMNS,
    FEEDBACK,
    SCHEMA,
    VERSION,
    Row,
    call_from,
    episode_from,
    in_parts,
    join_path,
)
from cotune.storage.sqlite_consumed import ConsumedGroups
from cotune.storage.sqlite_figures import SqliteFigures
from cotune.storage.sqlite_writer import Ledger, Writer

log = logging.getLogger("cotune.store")
Made = TypeVar("Made")

PAGE = 200
"""Episodes fetched per query, so that a slow reader holds no snapshot and the log can be folded back."""

_PATH = """
WITH RECURSIVE path (id) AS (
    SELECT ?
    UNION
    SELECT parent FROM path JOIN segments USING (id) WHERE parent IS NOT NULL)
SELECT id, parent, token_ids FROM path JOIN segments USING (id)"""


class SqliteStore(SqliteFigures):
    """A `Store`, which documents its methods, in one file. Reads see what is committed: `flush` first to read your own
    latest writes."""

    def __init__(self, path: Path, writer: Writer | None, lock: FileLock | None) -> None:
        """Use `SqliteStore.open`."""
        self.path = path
        self._writer = writer
        self._lock = lock
        self.write: Callable[[Sequence[Record]], None] = writer.put if writer else functools.partial(_refuse, path)
        self._readers: list[sqlite3.Connection] = []
        self._unreadable = 0
        self._connect: Callable[[Path], sqlite3.Connection] = _connect_reader
        self._shut = weakref.finalize(self, _shut, writer, self._readers, lock)
        survives_fork(self)

    @classmethod
    def open(cls, path: Path | str, read_only: bool = False) -> Self:
        """Open the records file `path`, or `records.db` in the folder `path`; a writer creates it.

        Raises RunError when another process writes it, when it is missing (read_only), or is not a records file of
        this version.
        """
        path = Path(path).absolute()
        if path.is_dir():
            path = path / RECORDS
        if read_only:
            if not path.is_file():
                raise RunError(f"There is no records file at {path}.", "Name a run folder or its records file.")
            store = cls(path, None, None)
            with store._reader() as db:
                _check(db, path)
            return store
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cause = f"The folder {path.parent} cannot be made: {error.strerror}."
            raise RunError(cause, "Check the path and its rights.") from None
        lock = FileLock(path.with_name(path.name + ".lock"), f"The records file {path}")
        try:
            path.touch()  # as other files of the run are made: SQLite's own mode leaves out the group
            return cls(path, Writer(_connect_writer(path), str(path)), lock)
        except OSError as error:
            lock.release()
            cause = f"The records file {path} cannot be written: {error.strerror}."
            raise RunError(cause, "Check its rights.") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a table that the writer reads at its start
            lock.release()
            raise unusable(path, error) from error
        except BaseException:
            lock.release()
            raise

    @classmethod
    def empty(cls, folder: Path) -> Self:
        """Records in memory, of which there are none."""
        store = cls(folder / RECORDS, None, None)
        store._connect = _connect_empty
        return store

    @property
    def address(self) -> str:
        return str(self.path)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def flush(self) -> None:
        if self._writer:
            self._writer.flush()

    @property
    def lost(self) -> int:
        return self._writer.lost if self._writer else 0

    @property
    def unreadable(self) -> int:
        return self._unreadable

    @property
    def refused(self) -> int:
        return self._writer.refused if self._writer else 0

    def episodes(
        self, *, phase: str | None = None, training_step: int | None = None, task: str | None = None
    ) -> Iterator[Episode]:
        wanted = {"phase": phase, "training_step": training_step, "task": task}
        filters = {name: value for name, value in wanted.items() if value is not None}
        where = "".join(f" AND {name} = ?" for name in filters)
        last = ""
        while True:
            sql = f"SELECT id, body, metrics FROM episodes WHERE id > ?{where} ORDER BY id LIMIT {PAGE}"
            page, before = self.rows(sql, (last, *filters.values())), last
            for last, *columns in page:  # noqa: B007
                yield from self._read(episode_from, columns)
            if len(page) < PAGE or last <= before:  # an id that is no text does not lead on
                return

    def episode(self, episode_id: str) -> Episode:
        found = self.rows("SELECT body, metrics FROM episodes WHERE id = ?", (episode_id,))
        if not found:
            raise RecordError(f"No finished episode {episode_id!r} in {self.path}.", "`cotune show RUN` lists them.")
        for episode in self._read(episode_from, found[0]):
            return episode
        raise RecordError(f"The episode {episode_id!r} in {self.path} cannot be read.", "Its row is broken: leave it.")

    def calls(
        self, episode_id: str, *, start: int = 0, limit: int | None = None, lean: bool = False
    ) -> list[CallRecord]:
        of_episode = "episode = ? ORDER BY step, id LIMIT ? OFFSET ?"
        return self._calls(of_episode, (episode_id, -1 if limit is None else limit, start), lean)

    def call(self, call_id: str) -> CallRecord:
        for call in self._calls("id = ?", (call_id,)):
            return call
        raise RecordError(f"No call {call_id!r} in {self.path} can be read.", "`cotune show RUN` lists episodes.")

    def _calls(self, where: str, parameters: Sequence[Any], lean: bool = False) -> list[CallRecord]:
        sql = f"SELECT body, candidates, {'NULL' if lean else 'token_ids'}, logprobs FROM calls WHERE {where}"
        return [call for row in self.rows(sql, parameters) for call in self._read(call_from, row)]

    def message(self, message_id: str) -> Any:
        found = self.rows("SELECT body FROM messages WHERE id = ?", (message_id,))
        if not found:
            raise RecordError(f"No message {message_id!r} in {self.path}.", "It may be among the `lost` records.")
        for body in self._read(msgspec.json.decode, found[0]):
            return join_images(body, self._image)
        raise RecordError(f"The message {message_id!r} in {self.path} cannot be read.", "Its row is broken: leave it.")

    def image(self, image_id: str) -> bytes:
        data = self._image(image_id)
        if data is None:
            raise RecordError(
                f"No image {image_id!r} in {self.path}.", "It was redacted, or is among the `lost` records."
            )
        return data

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

    def unfinished(self) -> Iterator[str]:
        sql = """SELECT DISTINCT episode FROM calls
                 WHERE episode NOT IN (SELECT id FROM episodes) ORDER BY episode"""
        return iter([episode for (episode,) in self.rows(sql)])

    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        members = groups if isinstance(groups, Mapping) else dict.fromkeys(groups, ())
        self._write_ledger(Ledger([(group, [*names]) for group, names in members.items()], training_step))

    def release(self, training_step: int) -> None:
        self._write_ledger(Ledger(None, training_step))

    def _write_ledger(self, ledger: Ledger) -> None:
        if self._writer is None:
            _refuse(self.path)
        elif failure := self._writer.write_ledger(ledger):
            raise RecordError(
                f"The ledger of consumed groups in {self.path} cannot be written ({failure}).",
                "Free the disk and resume: a group that is not in the ledger could be trained twice.",
            )

    def consumed(self) -> Mapping[str, int]:
        return ConsumedGroups(self.rows)

    def counters(self) -> Mapping[str, int]:
        return {"lost": 0, "refused": 0, **dict(self.rows("SELECT name, value FROM counters"))}

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Rows of any SELECT, on a connection of its own that cannot write. Tables: docs/reference/records.md."""
        with self._reader() as db:
            try:
                return db.execute(sql, parameters).fetchall()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if is_file_error(error):
                    raise unusable(self.path, error) from error
                if not is_value_error(error):
                    raise
        try:
            with contextlib.closing(forgiving(_connect_reader(self.path))) as db:
                return db.execute(sql, parameters).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise unusable(self.path, error) from error

    def close(self) -> None:
        self._shut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, make: Callable[..., Made], columns: Sequence[Any]) -> Iterator[Made]:
        """The record that `make` makes of a row; nothing, and it is counted, where the row is broken."""
        try:
            made = make(*columns)
        except (ValueError, TypeError, struct.error, RecursionError) as error:
            self._unreadable += 1
            if self._unreadable == 1:
                log.warning("%s: a broken row is left out (%s), as are any others", self.path, type(error).__name__)
            return
        yield made

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """A connection for this read alone: pooled, and never the writer's."""
        if not self._shut.alive:
            raise RunError(f"The store {self.path} is closed.", "Open it again to read.")
        try:
            db = self._readers.pop()
        except IndexError:
            db = self._connect(self.path)
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
        """A child process may read with connections of its own; the file belongs to the parent."""
        self._readers = []
        if self._writer:
            self._writer.abandon()


def _refuse(path: Path, records: Sequence[Record] = ()) -> None:
    raise RunError(f"{path} is open for reading only.", "Open it without read_only to write.")


def _connect_writer(path: Path) -> sqlite3.Connection:
    """With synchronous=NORMAL a commit is in the system's cache when it returns: it outlives the process."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            _check(db, path)
            db.execute("PRAGMA journal_mode = WAL")
        else:
            db.execute("PRAGMA page_size = 8192")
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 2000")
        db.execute("PRAGMA cache_size = -8000")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        db.close()
        raise unusable(path, error) from error
    except BaseException:
        db.close()
        raise
    return db


def _can_be_shared(path: Path) -> bool:
    """Whether readers can keep their index next to the file: not in a folder that they cannot write, where nobody
    writes the file either unless it has a log."""
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    writable = os.access(path.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return writable or index.exists() or (log.exists() and log.stat().st_size > 0)


def _reward(name: Any, value: Any) -> float:
    if not isinstance(name, str) or isinstance(value, str | bytes):
        raise TypeError("a reward is a number with a name")
    return float("nan") if value is None else value


def _text(name: Any, value: Any) -> str:
    if not isinstance(name, str) or not isinstance(value, str):
        raise TypeError("feedback is a text with a name")
    return value


def _connect_reader(path: Path) -> sqlite3.Connection:
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro{'' if _can_be_shared(path) else '&immutable=1'}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=5.0)
    except sqlite3.Error as error:
        raise unusable(path, error) from error


def _connect_empty(_: Path) -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.executescript(SCHEMA)
    return db


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Raises RunError unless this is a records file of this version."""
    try:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unusable(path, error) from error
    if application != APPLICATION:
        raise RunError(f"{path} is not a cotune records file.", "Name a run folder or its records file.")
    if version != VERSION:
        raise RunError(
            f"{path} has records of version {version}; this cotune reads version {VERSION}.",
            "Use the cotune that wrote it, or start a new run folder.",
        )
    try:
        for table, columns in COLUMNS.items():
            db.execute(f"SELECT {columns} FROM {table} LIMIT 0")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unusable(path, error) from error


def _shut(writer: Writer | None, readers: list[sqlite3.Connection], lock: FileLock | None) -> None:
    while readers:  # before the writer: an open reader would keep the log from being folded into the file
        readers.pop().close()
    if writer:
        writer.close()
    if lock:
        lock.release()
