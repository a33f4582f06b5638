"""Records in a PostgreSQL database: many processes write, any number read. They are in the schema `cotune`, or the one
that the address names as its `search_path`."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import FloatLoader
from psycopg.types.string import StrDumper

from cotune.errors import RunError, error_line
from cotune.integrations.collect.postgres.months import drop_month, stored_months
from cotune.integrations.collect.postgres.tables import (
    INDEXED,
    LOCK,
    MOST_SHORTENED,
    NUMBERED,
    SCHEMA,
    SHORTENED,
    TYPES,
    UPGRADES,
    VERSION,
    insertion,
    month_of,
    partition_statement,
    staging_table,
    translate_query,
)
from cotune.storage.open_store import StoreUnavailableError, without_password
from cotune.storage.schema import COLUMNS, TABLES, WITHDRAWN, NameList, Row
from cotune.storage.sql.store import SqlStore, StoreFailure
from cotune.storage.sql.upkeep import key_columns
from cotune.storage.sql.writer import Writer

log = logging.getLogger("cotune.store")
Connection = psycopg.Connection[Row]

PATIENCE: Mapping[str, Any] = {
    "application_name": "cotune",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""Parameters of connections, unless the address has its own: a server that has gone is noticed within 25 seconds, and
not after the two hours of most systems."""
IDLE_SECONDS = 10
"""After which the server ends a transaction whose process does nothing: all other writers wait for it."""
LOCK_SECONDS = 20
"""How long a writer waits for its turn before the attempt counts as failed."""
LOOK_SECONDS = 5.0
"""Seconds between two looks at a writer that does not give up its turn."""

_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


class PostgresStore(SqlStore[Connection]):
    """A `Store`, which documents its methods, in a database. Whoever writes waits for its turn: one transaction of many
    records at a time, so that numbers of rows grow as they are committed."""

    @classmethod
    def open(cls, address: str, read_only: bool = False) -> Self:
        """Open the records in the database `address`; a writer makes their tables, or brings them up to date.

        Raises StoreUnavailableError if no server answers now, and RunError if the database has no records (read_only),
        has records of another version, or refuses the user.
        """
        address = str(address)
        display_address = without_password(address)
        try:
            return cls._open(address, display_address, read_only)
        except psycopg.errors.LockNotAvailable as error:
            text = (
                f"The store {display_address} is blocked: another process has been writing to it for {LOCK_SECONDS} s."
            )
            raise StoreUnavailableError(text, "Try again later, or end that process.") from error
        except psycopg.Error as error:
            if not _accepts_connections(address):
                text = f"The store {display_address} does not answer: {error_line(error)}."
                raise StoreUnavailableError(text, "Check that the server runs, and the address.") from error
            if not isinstance(error, psycopg.OperationalError):
                raise _unusable(display_address, error) from error

        # The server takes connections now, so it may have started since the first attempt.
        try:
            return cls._open(address, display_address, read_only)
        except psycopg.Error as error:
            raise _unusable(display_address, error) from error

    @classmethod
    def _open(cls, address: str, display_address: str, read_only: bool) -> Self:
        """Open the database at `address`, and for writing prepare its tables.

        `display_address` is the address without its password, for messages.
        """
        if read_only:
            with _connect(address) as db:
                _check(db, display_address)
            return cls(display_address, lambda: _connect(address), writer=None, lock=None)
        with _connect(address, writes=True) as db:
            _prepare(db, display_address)
        writer = Writer(PostgresDatabase(address, display_address))
        return cls(display_address, lambda: _connect(address), writer, lock=None)

    @property
    def folder(self) -> None:
        return None

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Rows of any SELECT in SQLite's dialect, read on a connection that cannot write."""
        may_use_old_connection = bool(self._readers)  # connections of earlier queries
        try:
            with self._reader() as db:
                stored_parameters = [_stored_parameter(parameter) for parameter in parameters]
                rows = db.execute(translate_query(sql), stored_parameters).fetchall()
                return _restore_long_texts(db, rows)
        except psycopg.OperationalError as error:
            if not may_use_old_connection:
                raise _unusable(self.address, error) from error
            # The connections may be older than the last start of the server: try again with a new one.
            while self._readers:
                self._readers.pop().close()
            return self.rows(sql, parameters)
        except psycopg.Error as error:
            raise _unusable(self.address, error) from error

    def drop_months(self, before: float, app: str, keep_trained: bool) -> Iterator[Mapping[str, int]]:
        """Drop months whose records are all old enough. Yields the dropped episodes and calls of each month.

        A partition that cannot be dropped is left to the deletion of single rows.
        """
        for month in self.act(stored_months):
            dropping = partial(drop_month, month=month, before=before, app=app, keep_trained=keep_trained)
            try:
                if dropped_counts := self.act(dropping):
                    yield dropped_counts
            except StoreFailure as error:
                log.warning("%s: %s is deleted row by row (%s)", self.address, month, error.reason)


class PostgresDatabase:
    """The connection of a writer: a `Database`."""

    shared = True
    # A server whose disk fails in an unusual way, such as by a quota, calls that an internal error. The last three: the
    # rights or the tables were changed, which is no fault of a row.
    trouble: tuple[type[Exception], ...] = (
        *(psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError),
        *(psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn),
    )
    broken: tuple[type[Exception], ...] = (psycopg.Error, ValueError, OverflowError, TypeError, struct.error)

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self._address = address
        self._months: set[str] = set()
        self._db = _connect(address, writes=True)

    def begin(self) -> None:
        if self._db.closed or self._db.broken:
            self._db.close()
            self._db = _connect(self._address, writes=True)
        self._db.execute("BEGIN")
        _take_turn(self._db)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with _faults_of_values():
            cursor = self._db.execute(translate_query(sql), [*map(_stored_parameter, parameters)])
        return cursor.fetchall() if cursor.description else []

    def insert(self, table: str, values: Sequence[Any]) -> None:
        """Insert rows into a table. `values` has the values of the first row, then of the second row, and so on.

        Rows go through a staging table because COPY cannot skip duplicates.
        """
        columns = COLUMNS[table]
        sqlite_types = [column.split()[1] for column in TABLES[table] if not column.startswith("PRIMARY KEY")]
        types = [TYPES[sqlite_type] for sqlite_type in sqlite_types]
        width = len(columns)
        all_rows = [values[start : start + width] for start in range(0, len(values), width)]
        rows = _one_row_per_key(table, all_rows)
        if table in NUMBERED:
            # Tables with numbered rows have a partition for each month.
            self._make_partitions(table, [row[0] for row in rows])
        with _faults_of_values(), self._db.transaction(), self._db.cursor() as cursor:
            cursor.execute(staging_table(table))
            # Remove the rows of an earlier insertion in this transaction. TRUNCATE would make a new file each time.
            cursor.execute(f"DELETE FROM stage_{table}")
            with cursor.copy(f"COPY stage_{table} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(types)
                for row in rows:
                    copy.write_row([*map(_stored_value, row)])
            cursor.execute(insertion(table))

    def _make_partitions(self, table: str, ids: Sequence[str]) -> None:
        """Create the partitions of the months in which these ids were made, unless they exist."""
        now = datetime.now(UTC)
        for month in {month_of(id, now) for id in ids}:
            name = f"{table}_{month}"
            if month is None or name in self._months:
                continue
            try:
                with self._db.transaction():
                    self._db.execute(partition_statement(table, month))
            except psycopg.errors.CheckViolation:
                pass  # rows of this month came before its partition, and lie in the partition of all others
            self._months.add(name)

    def widen(self) -> None:
        """The server has its own memory."""

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        self._months.clear()
        if not self._db.closed:
            try:
                self._db.rollback()
            except psycopg.Error:
                self._db.close()

    def pause(self) -> list[str]:
        return []

    def is_unchanged(self) -> bool:
        return True  # this writer keeps nothing in memory that another one could make untrue

    def close(self) -> list[str]:
        self._db.close()
        return []


@contextlib.contextmanager
def _faults_of_values() -> Iterator[None]:
    """Raise DataError if the block passes a value above a limit of PostgreSQL, such as a text too long for an index.

    psycopg raises an OperationalError then, as for a full disk, after which a writer waits and tries again. Here that
    would be of no use.
    """
    try:
        yield
    except psycopg.OperationalError as error:
        if (error.sqlstate or "").startswith("54"):  # class 54: program limit exceeded
            raise psycopg.DataError(error_line(error)) from error
        raise


def _restore_long_texts(db: Connection, rows: list[Row]) -> list[Row]:
    """Put the whole texts back into rows of a query.

    Columns that are indexed hold long texts in a shortened form with a hash, because PostgreSQL limits the size of an
    index entry. A shortened text names its column, so the whole texts of one column are read by one query.
    """
    shortened: dict[str, set[str]] = {}  # by column
    for row in rows:
        for value in row:
            if isinstance(value, str) and len(value) <= MOST_SHORTENED and (match := SHORTENED.search(value)):
                column = match[1]
                shortened.setdefault(column, set()).add(value)
    if not shortened:
        return rows
    texts: dict[str, str] = {}
    for column, values in shortened.items():
        texts.update(_whole_texts(db, column, values))
    return [tuple(texts.get(value, value) if isinstance(value, str) else value for value in row) for row in rows]


def _whole_texts(db: Connection, column: str, shortened: set[str]) -> dict[str, str]:
    """The whole texts of the shortened texts in a column. Each is read from any record that has it."""
    table = next(table for table, columns in INDEXED.items() if column in columns)
    sql = f"""SELECT shortened, (SELECT body FROM {table} WHERE {column} = shortened LIMIT 1)
        FROM unnest(%s::text[]) AS shortened"""
    texts = {}
    for value, body in db.execute(sql, [[*shortened]]).fetchall():
        if body is None:  # no record has it any more
            continue
        field = msgspec.json.decode(body)[column]
        if column == "task":
            field = field["id"]
        elif column == "policy":
            field = field["name"]
        texts[value] = str(_stored_value(field))
    return texts


def _one_row_per_key(table: str, rows: list[Sequence[Any]]) -> list[Sequence[Any]]:
    """One row for each key, as one SQL statement cannot change a row twice.

    The first row of a key is kept, with two exceptions: a row that withdraws an episode replaces the episode's row, and
    in tables whose keys have several columns the last row is kept.
    """
    n_key_columns = len(key_columns(table))
    row_of_key: dict[Any, Sequence[Any]] = {}
    for row in rows:
        key = tuple(row[:n_key_columns])
        withdraws_episode = table == "episodes" and row[4] == WITHDRAWN  # the column `status`
        if key not in row_of_key or n_key_columns > 1 or withdraws_episode:
            row_of_key[key] = row
    return list(row_of_key.values())


def _stored_value(value: Any) -> Any:
    """A value as the database takes it: a text without NUL, and NULL for NaN, as in SQLite."""
    if isinstance(value, str):
        return value.replace("\0", "\u2400")
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _stored_parameter(value: Any) -> Any:
    """A parameter of a query as the database takes it. A list of names is JSON, in which NUL is escaped."""
    if isinstance(value, NameList):
        return _ESCAPED_NUL.sub("\\1\u2400", value)
    return _stored_value(value)


def _connect(address: str, writes: bool = False) -> Connection:
    """A connection with the settings of a writer or a reader. Settings in the user's address take precedence."""
    user_settings = conninfo_to_dict(address)
    defaults: dict[str, Any] = {name: value for name, value in PATIENCE.items() if name not in user_settings}
    db = psycopg.connect(address, autocommit=True, **defaults)
    db.adapters.register_dumper(str, StrDumper)
    db.adapters.register_loader("numeric", FloatLoader)
    db.execute("SET jit TO off")  # it costs more than these queries take
    if db.execute("SHOW search_path").fetchall() == [('"$user", public',)]:  # the default of PostgreSQL
        db.execute("SET search_path TO cotune")
    if writes:
        db.execute(f"SET idle_in_transaction_session_timeout TO {1000 * IDLE_SECONDS}")
        db.execute(f"SET lock_timeout TO {1000 * LOCK_SECONDS}")
    else:
        db.execute("SET work_mem TO '64MB'")  # figures sort and hash the ids of all episodes
        db.execute("SET default_transaction_read_only TO on")
    return db


def _accepts_connections(address: str) -> bool:
    """Whether a server takes connections at this address; not one that is starting up."""
    return psycopg.pq.PGconn.ping(make_conninfo(address, connect_timeout=5).encode()) == psycopg.pq.Ping.OK


def _take_turn(db: Connection) -> None:
    """Take the lock that lets one process write at a time. Raises LockNotAvailable if others have it for
    `LOCK_SECONDS`.

    The server ends the transaction of a process that stopped in the middle of it. It does not do so while the process
    copies rows, so a process whose copy makes no progress is disconnected here, and a later attempt succeeds.
    """
    try:
        db.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
    except psycopg.errors.LockNotAvailable:
        if db.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
            db.execute("ROLLBACK")
        progress_before = db.execute(_COPYING).fetchall()
        time.sleep(LOOK_SECONDS)
        progress_after = db.execute(_COPYING).fetchall()
        if progress_after == progress_before:
            for pid in {pid for pid, *_ in progress_before}:
                log.warning("a writer that stands still is disconnected (process %d of the server)", pid)
                db.execute("SELECT pg_terminate_backend(%s)", [pid])
        raise


_COPYING = f"""SELECT pid, xact_start, bytes_processed FROM pg_locks JOIN pg_stat_activity USING (pid)
    JOIN pg_stat_progress_copy USING (pid) WHERE locktype = 'advisory' AND objid = {LOCK} AND granted
    AND wait_event = 'ClientRead' AND usename = current_user AND pg_locks.database = pg_stat_progress_copy.datid"""
"""The process of the server that has the turn to write and waits for rows from its client. The server's time-out for
idle transactions does not apply then: for the server, COPY is running."""


def _prepare(db: Connection, name: str) -> None:
    """Make the tables, or bring them up to date; one process at a time."""
    with db.transaction():
        _take_turn(db)
        if _version(db) is None:
            # Tables are made in the first schema of the search path, which an address may name before it exists.
            ((schema,),) = db.execute(
                "SELECT quote_ident((parse_ident(current_setting('search_path'), false))[1])"
            ).fetchall()
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}; {SCHEMA}")
        while (version := _version(db)) in UPGRADES:
            db.execute(UPGRADES[version])
    _check(db, name)


def _version(db: Connection) -> int | None:
    if not db.execute("SELECT to_regclass('store')").fetchall()[0][0]:
        return None
    return int(db.execute("SELECT version FROM store").fetchall()[0][0])


def _check(db: Connection, name: str) -> None:
    """Raise RunError unless the database has records of the version that this cotune reads."""
    version = _version(db)
    if version is None:
        raise RunError(f"The database {name} has no records.", "A writer makes their tables: see cotune collect.")
    if version != VERSION:
        remedy = "Use the cotune that wrote it."
        if version < VERSION:
            remedy = f"Bring it up to date: cotune records upgrade {name}"
        raise RunError(f"{name} has records of version {version}; this cotune reads version {VERSION}.", remedy)


def _unusable(name: str, error: psycopg.Error) -> RunError:
    remedy = "Check the address, the server and the rights of its user."
    return RunError(f"The store {name} cannot be used: {error_line(error)}.", remedy)
