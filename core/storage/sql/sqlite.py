"""A records file in SQLite: its tables and its connections."""

from __future__ import annotations

import functools
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotune.errors import RunError
from cotune.runtime.forks import leave_open
from cotune.storage.damage import unusable
from cotune.storage.run_layout import EARLIER
from cotune.storage.schema import APPLICATION, COLUMNS, CONFLICTS, FIGURES, INDEXES, TABLES, VERSION, Row

MOST_VALUES = 32766
"""Maximum number of values in one statement. SQLite releases the interpreter lock once per statement, and a busy
application returns it only after its switch interval: many small statements would starve the writer."""

_KEYED = ("feedback", "replaced", "consumed", "counters")
"""Tables whose rows are stored by their keys and have no row number."""


def _table(name: str, columns: Sequence[str]) -> str:
    return f"CREATE TABLE {name} ({', '.join(columns)}){' WITHOUT ROWID' if name in _KEYED else ''};"


SCHEMA = f"""
{" ".join(_table(name, columns) for name, columns in TABLES.items())}
{INDEXES}
{FIGURES}
CREATE VIEW candidates AS
    SELECT calls.id || '.' || json_extract(value, '$.index') AS id, calls.id AS call, calls.episode, calls.role,
           calls.turn, json_extract(value, '$.index') AS "index", json_extract(value, '$.text') AS text,
           json_extract(value, '$.tokens') AS tokens, json_extract(value, '$.finish_reason') AS finish_reason,
           json_extract(value, '$.index') IS iif(json_valid(body), json_extract(body, '$.chosen'), NULL) AS chosen
    FROM calls, json_each(iif(json_valid(calls.candidates), calls.candidates, '[]'));
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
"""

_NUMBERED = ("calls", "episodes", "rewards")
"""Tables in which readers recognize new rows by their numbers (`Figures.marks`, `Figures.newest`)."""
_KEEP_NUMBERS = "".join(
    f"""CREATE TEMP TRIGGER keep_{table} BEFORE DELETE ON main.{table}
    WHEN old.rowid = (SELECT max(rowid) FROM {table}) BEGIN
        INSERT INTO counters VALUES ('last_{table}', old.rowid)
            ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value);
    END;"""
    for table in _NUMBERED
)
"""When the last row is deleted, its number is stored in `counters`: SQLite would give it to the next row again."""


@functools.cache
def insertion(table: str, rows: int) -> str:
    """The statement that inserts this number of rows."""
    marks = f"({','.join('?' * len(COLUMNS[table]))})"
    conflict = CONFLICTS[table].format(next=f"(SELECT max(rowid) + 1 FROM {table})")
    return f"INSERT INTO {table} VALUES {','.join([marks] * rows)} {conflict}"


class SqliteDatabase:
    """The connection of a file's writer: a `Database`."""

    shared = False
    trouble: tuple[type[Exception], ...] = (sqlite3.OperationalError,)
    broken: tuple[type[Exception], ...] = (sqlite3.Error, ValueError, OverflowError)

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._db = connect_writer(path)
        self._opened = os.stat(path)  # noqa: PTH116
        self._version_at_pause: int | None = None

    def _is_in_place(self) -> bool:
        """Whether the path still leads to the open file. Another process may have removed or replaced it."""
        try:
            return os.path.samestat(os.stat(self.name), self._opened)  # noqa: PTH116
        except OSError:
            return False

    def _data_version(self) -> int | None:
        """A number that changes when another connection commits; None if the file cannot be read."""
        try:
            version: int = self._db.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error:
            return None
        return version

    def begin(self) -> None:
        if not self._is_in_place():  # SQLite would write to a file that was removed
            raise sqlite3.OperationalError("the file has been removed or replaced")
        self._version_at_pause = None
        self._db.execute("BEGIN IMMEDIATE")

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return self._db.execute(sql, parameters).fetchall()

    def insert(self, table: str, values: Sequence[Any]) -> None:
        """Insert rows. Their numbers (rowid) are higher than the numbers of all earlier rows, deleted rows included."""
        # SQLite gives a deleted highest number to the next row. Readers that continue after a number would miss that
        # row.
        last = self._deleted_last(table) if values else 0
        if not last:
            self._insert(table, values)
            return
        # A blank row with the deleted number, until the new rows are inserted, so that they get higher numbers.
        columns = COLUMNS[table]
        blank = ",".join("''" for _ in columns)
        self._db.execute(f"INSERT INTO {table} (rowid, {','.join(columns)}) VALUES (?, {blank})", (last,))
        try:
            self._insert(table, values)
        finally:
            self._db.execute(f"DELETE FROM {table} WHERE rowid = ?", (last,))

    def _deleted_last(self, table: str) -> int:
        """The number of the table's last row if it was deleted; else 0."""
        if table not in _NUMBERED:
            return 0
        sql = f"SELECT value FROM counters WHERE name = ? AND value > (SELECT coalesce(max(rowid), 0) FROM {table})"
        row: Row | None = self._db.execute(sql, (f"last_{table}",)).fetchone()
        return row[0] if row else 0

    def _insert(self, table: str, values: Sequence[Any]) -> None:
        """Insert rows with few statements of few sizes, as SQLite compiles each size once.

        The number of rows is always a power of two. Copies of the last row fill the rest; inserting a row twice
        changes nothing.
        """
        width = len(COLUMNS[table])
        most = 1 << (MOST_VALUES // width).bit_length() - 1  # the highest power of two that fits
        for start in range(0, len(values), most * width):
            part = values[start : start + most * width]
            rows = len(part) // width
            size = 1 << (rows - 1).bit_length()
            self._db.execute(insertion(table, size), [*part, *list(part[-width:]) * (size - rows)])

    def widen(self) -> None:
        # Pages that do not fit the cache are written to the log, even if a later row of the transaction empties them.
        self._db.execute("PRAGMA cache_size = -128000")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def pause(self) -> list[str]:
        warnings = self._fold()
        self._version_at_pause = self._data_version()
        return warnings

    def is_unchanged(self) -> bool:
        version = self._data_version()
        return self._is_in_place() and version is not None and version == self._version_at_pause

    def close(self) -> list[str]:
        """Close the connection after folding its log into the file. Returns warnings."""
        # During a pause there is nothing to move, and another process may use the file.
        warnings = self._fold() if self._version_at_pause is None else []
        if not self._is_in_place() and Path(self.name + "-wal").exists():
            # This is the log of another file with the same name, perhaps in use. On closing, SQLite would delete it.
            leave_open(self._db)
        else:
            self._db.close()
        return warnings

    def _fold(self) -> list[str]:
        """Move the log into the file, so that the one file holds all records. Returns warnings for people."""
        warnings = []
        try:
            self._db.execute("PRAGMA busy_timeout = 1000")
            ((busy, _, _),) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._db.execute("PRAGMA busy_timeout = 5000")
            if busy:
                warnings.append("a reader holds it, so records are left in its -wal file: copy both")
        except sqlite3.Error as error:
            warnings.append(f"records are left in its -wal file: copy both ({error})")
        return warnings


def connect_writer(path: Path) -> sqlite3.Connection:
    """A connection that writes. Creates the tables in an empty file.

    With synchronous=NORMAL, a commit is in the system's cache when it returns: it survives the end of the process.
    """
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            check(db, path)
            db.execute("PRAGMA journal_mode = WAL")
        else:
            db.execute("PRAGMA page_size = 8192")
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        db.executescript(_KEEP_NUMBERS)
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
    """Whether readers can keep their index next to the file.

    They cannot in a folder without write permission. There, nobody writes the file either, unless it has a log.
    """
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    writable = os.access(path.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return writable or index.exists() or (log.exists() and log.stat().st_size > 0)


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro{'' if _can_be_shared(path) else '&immutable=1'}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=5.0)
    except sqlite3.Error as error:
        raise unusable(path, error) from error


def connect_empty() -> sqlite3.Connection:
    """A connection to tables without records, in memory."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.executescript(SCHEMA)
    return db


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """The version of a records file. Raises RunError for another file."""
    try:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unusable(path, error) from error
    if application != APPLICATION:
        raise RunError(f"{path} is not a cotune records file.", "Name a run folder or its records file.")
    return version


def check(db: sqlite3.Connection, path: Path) -> None:
    """Raises RunError unless this is a records file of this version."""
    version = version_of(db, path)
    if version != VERSION:
        remedy = "Use the cotune that wrote it, or start a new run folder."
        if 3 <= version < VERSION:
            remedy = f"Bring it up to date with {EARLIER}: cotune records upgrade {path}"
        raise RunError(f"{path} has records of version {version}; this cotune reads version {VERSION}.", remedy)
    try:
        for table, columns in COLUMNS.items():
            db.execute(f"SELECT {', '.join(columns)} FROM {table} LIMIT 0")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unusable(path, error) from error
