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
        """Insert rows, from the values of all rows one after another.

        The new row numbers (SQLite's rowid) are higher than the numbers of all earlier rows, deleted rows included.
        Readers continue after the last number that they have read.
        """
        deleted_number = self._number_of_deleted_last_row(table) if values else 0
        if not deleted_number:
            self._insert(table, values)
            return
        # SQLite would give the number of the deleted row to the first new row. A blank row has it meanwhile.
        columns = COLUMNS[table]
        blanks = ",".join("''" for _ in columns)
        sql = f"INSERT INTO {table} (rowid, {','.join(columns)}) VALUES (?, {blanks})"
        self._db.execute(sql, (deleted_number,))
        try:
            self._insert(table, values)
        finally:
            self._db.execute(f"DELETE FROM {table} WHERE rowid = ?", (deleted_number,))

    def _number_of_deleted_last_row(self, table: str) -> int:
        """The number of the table's last row if it was deleted; else 0."""
        if table not in _NUMBERED:
            return 0
        sql = f"SELECT value FROM counters WHERE name = ? AND value > (SELECT coalesce(max(rowid), 0) FROM {table})"
        row: Row | None = self._db.execute(sql, (f"last_{table}",)).fetchone()
        return row[0] if row else 0

    def _insert(self, table: str, values: Sequence[Any]) -> None:
        """Insert rows in few statements, each with a power of two as its number of rows.

        SQLite compiles a statement once for each number of rows, so there must be few different numbers. Copies of the
        last row fill a statement; inserting a row twice changes nothing.
        """
        width = len(COLUMNS[table])
        # The highest power of two that fits: 2 ** (bits - 1) is the highest one that is not above a number.
        max_rows = 2 ** ((MOST_VALUES // width).bit_length() - 1)
        for start in range(0, len(values), max_rows * width):
            part = values[start : start + max_rows * width]
            n_rows = len(part) // width
            n_with_copies = 2 ** (n_rows - 1).bit_length()  # the next power of two
            last_row = list(part[-width:])
            self._db.execute(insertion(table, n_with_copies), [*part, *last_row * (n_with_copies - n_rows)])

    def widen(self) -> None:
        # Pages that do not fit the cache are written to the log, even if a later row of the transaction empties them.
        self._db.execute("PRAGMA cache_size = -128000")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def pause(self) -> list[str]:
        warnings = self._move_log_into_file()
        self._version_at_pause = self._data_version()
        return warnings

    def is_unchanged(self) -> bool:
        version = self._data_version()
        return self._is_in_place() and version is not None and version == self._version_at_pause

    def close(self) -> list[str]:
        """Close the connection after moving the write-ahead log into the file. Returns warnings for people."""
        warnings: list[str] = []
        is_paused = self._version_at_pause is not None
        if not is_paused:  # during a pause there is nothing to move, and another process may use the file
            warnings = self._move_log_into_file()
        if not self._is_in_place() and Path(self.name + "-wal").exists():
            # This is the log of another file with the same name, perhaps in use. On closing, SQLite would delete it.
            leave_open(self._db)
        else:
            self._db.close()
        return warnings

    def _move_log_into_file(self) -> list[str]:
        """Move the write-ahead log (the -wal file) into the file, so that one file holds all records. Returns warnings
        for people."""
        warnings = []
        try:
            # Wait for readers for one second instead of the usual five.
            self._db.execute("PRAGMA busy_timeout = 1000")
            ((has_reader, _, _),) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._db.execute("PRAGMA busy_timeout = 5000")
            if has_reader:
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
        (n_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if n_tables:
            check(db, path)
            db.execute("PRAGMA journal_mode = WAL")
        else:
            db.execute("PRAGMA page_size = 8192")
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        db.executescript(_KEEP_NUMBERS)  # row numbers are not given twice
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 2000")  # pages of the log, before they are moved into the file
        db.execute("PRAGMA cache_size = -8000")  # KiB
    except (sqlite3.Error, UnicodeDecodeError) as error:
        db.close()
        raise unusable(path, error) from error
    except BaseException:
        db.close()
        raise
    return db


def _can_be_shared(path: Path) -> bool:
    """Whether readers can share the file with a writer, for which SQLite needs an index file next to it.

    Without write permission in the folder they can only if the index exists, or if a writer has left a log.
    """
    log = path.with_name(f"{path.name}-wal")
    index = path.with_name(f"{path.name}-shm")
    # The effective user decides about permissions, but not every system can ask for it.
    can_ask_effective_user = os.access in os.supports_effective_ids
    is_folder_writable = os.access(path.parent, os.W_OK, effective_ids=can_ask_effective_user)
    has_log = log.exists() and log.stat().st_size > 0
    return is_folder_writable or index.exists() or has_log


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
    """The version of the tables in a records file. Raises RunError if `db` is not a records file."""
    try:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unusable(path, error) from error
    if application != APPLICATION:
        raise RunError(f"{path} is not a cotune records file.", "Name a run folder or its records file.")
    return version


def check(db: sqlite3.Connection, path: Path) -> None:
    """Raise RunError unless this is a records file of this version."""
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
