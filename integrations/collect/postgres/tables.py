"""The tables of `core/storage/schema.py` in PostgreSQL, and the few words of SQLite's dialect that it lacks."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from cotune.records.ids import ulid
from cotune.storage.schema import COLUMNS, CONFLICTS, FIGURES, INDEXES, TABLES

VERSION = 7
"""Version of the tables in PostgreSQL; raised when they change, with a step in `UPGRADES`."""

LOCK = 0x636F7475
"""Advisory lock of the one transaction that writes."""

TYPES = {"TEXT": "text", "BLOB": "bytea", "REAL": "float8", "INTEGER": "int4"}
"""PostgreSQL's types by SQLite's."""

NUMBERED = ("calls", "episodes", "rewards")
"""Tables whose rows have a number, `rowid`, in the order of their commits. They are partitioned by the month of their
ids, which begin with their time."""


INDEXED = {"episodes": ("task", "phase"), "calls": ("role", "model", "policy")}
"""Columns of indexes that may hold long texts of applications. An index entry takes 2,704 bytes at most, so a text of
more than 500 bytes is stored there as its beginning with a hash. The column `body` has the whole text."""

_NAMES = "|".join(name for columns in INDEXED.values() for name in columns)
SHORTENED = re.compile(f"…({_NAMES})-[0-9a-f]{{1,16}}-[0-9a-f]{{1,16}}\\Z")
"""How a shortened text ends: with the name of its column, and the hash."""

MOST_SHORTENED = 150
"""Characters of a shortened text, at the most."""

_INDEXED = """
CREATE OR REPLACE FUNCTION indexed(name text, value text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN octet_length($2) <= 500 THEN $2
        ELSE left($2, 100) || '…' || $1 || '-' || to_hex(hashtextextended($2, 0)) || '-' ||
             to_hex(hashtextextended($2, 1)) END $$;
"""


def _columns(table: str) -> str:
    """The columns of a table in PostgreSQL's types, translated from the types of SQLite."""
    columns = []
    for column in TABLES[table]:
        if column.startswith("PRIMARY KEY"):
            columns.append(column)
            continue
        name, _, type_and_constraints = column.partition(" ")
        kind, _, constraints = type_and_constraints.partition(" ")
        postgres_type = TYPES.get(kind, kind)
        if kind == "TEXT":
            postgres_type = 'text COLLATE "C"'  # SQLite too compares texts by their bytes
        elif kind == "INTEGER" and table == "counters":
            postgres_type = "bigint"
        columns.append(f"{name} {postgres_type} {constraints}")
    if table in NUMBERED:
        columns.append(f"rowid bigint NOT NULL DEFAULT nextval('{table}_numbers')")
    return ", ".join(columns)


def _table(table: str) -> str:
    if table not in NUMBERED:
        return f"CREATE TABLE {table} ({_columns(table)});"
    return f"""CREATE SEQUENCE {table}_numbers;
        CREATE TABLE {table} ({_columns(table)}) PARTITION BY RANGE ({COLUMNS[table][0]});
        CREATE TABLE {table}_other PARTITION OF {table} DEFAULT;
        CREATE INDEX {table}_by_number ON {table} (rowid);"""


_FUNCTIONS = """
CREATE OR REPLACE FUNCTION json_each(text) RETURNS TABLE (value text) LANGUAGE sql IMMUTABLE
    AS $$ SELECT json_array_elements_text($1::json) $$;
CREATE OR REPLACE FUNCTION instr(text, text) RETURNS int4 LANGUAGE sql IMMUTABLE AS $$ SELECT strpos($1, $2) $$;
CREATE OR REPLACE FUNCTION date(float8, text) RETURNS text LANGUAGE sql IMMUTABLE
    AS $$ SELECT to_char(to_timestamp($1) AT TIME ZONE 'UTC', 'YYYY-MM-DD') $$;
"""
"""Functions of SQLite that queries use."""

SCHEMA = f"""
CREATE TABLE store (version int4 NOT NULL);
INSERT INTO store VALUES ({VERSION});
{" ".join(map(_table, TABLES))}
{INDEXES}
{FIGURES}
{_FUNCTIONS}
{_INDEXED}
CREATE VIEW candidates AS
    SELECT calls.id || '.' || (value ->> 'index') AS id, calls.id AS call, calls.episode, calls.role, calls.turn,
           (value ->> 'index')::int4 AS "index", value ->> 'text' AS text, (value ->> 'tokens')::int4 AS tokens,
           coalesce(value ->> 'finish_reason', 'stop') AS finish_reason,
           value ->> 'index' IS NOT DISTINCT FROM calls.body::json ->> 'chosen' AS chosen
    FROM calls, json_array_elements(calls.candidates::json) AS value;
"""


def _shorten(table: str) -> str:
    """The statement that shortens the long texts of a table that an earlier version has stored."""
    changes = ", ".join(f"{name} = indexed('{name}', {name})" for name in INDEXED[table])
    long = " OR ".join(f"octet_length({name}) > 500" for name in INDEXED[table])
    return f"UPDATE {table} SET {changes} WHERE {long};"


UPGRADES = {
    5: f"{FIGURES} UPDATE store SET version = 6;",
    6: f"{_INDEXED} {' '.join(map(_shorten, INDEXED))} UPDATE store SET version = 7;",
}
"""The statements that bring a store of a version to the next one."""


def staging_table(table: str) -> str:
    """The temporary table that rows are copied to before they are inserted."""
    columns = f"SELECT {', '.join(COLUMNS[table])} FROM {table} WHERE false"
    return f"CREATE TEMPORARY TABLE IF NOT EXISTS stage_{table} ON COMMIT DELETE ROWS AS {columns}"


def insertion(table: str) -> str:
    """The statement that inserts the rows of the staging table into the table."""
    columns = COLUMNS[table]
    indexed = INDEXED.get(table, ())
    values = [f"indexed('{name}', {name})" if name in indexed else name for name in columns]
    conflict = CONFLICTS[table].format(next="excluded.rowid")
    return f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(values)} FROM stage_{table} {conflict}"


_EQUAL = re.compile(rf"\b({_NAMES}) = \?")
_AMONG = re.compile(rf"\b({_NAMES}) IN \(SELECT value FROM")


def translate_query(sql: str) -> str:
    """A query in SQLite's dialect as psycopg takes it; LIKE does not distinguish cases there. Values that are compared
    with a column of `INDEXED` are shortened as the column is."""
    sql = _EQUAL.sub(r"\1 = indexed('\1', ?)", sql)
    sql = _AMONG.sub(r"\1 IN (SELECT indexed('\1', value) FROM", sql)
    return sql.replace("%", "%%").replace("?", "%s").replace(" LIKE ", " ILIKE ")


_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{9}")
_DIGITS = {digit: number for number, digit in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
_EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)


def month_of(id: str, now: datetime) -> str | None:
    """The month in which an id was made, as `2026_11`; None for an id that tells no time, or one that is unlikely."""
    if not _ULID.match(id):
        return None
    # The first ten characters of an id are its time in base 32.
    milliseconds = 0
    for digit in id[:10]:
        milliseconds = 32 * milliseconds + _DIGITS[digit]
    # The clock of another machine may be ahead by up to a day.
    latest = now + timedelta(days=1)
    if not _EARLIEST.timestamp() * 1000 <= milliseconds <= latest.timestamp() * 1000:
        return None
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y_%m}"


def month_bounds(month: str) -> tuple[str, str]:
    """The lowest id of a month, and that of the next one."""
    year, number = map(int, month.split("_"))
    first = datetime(year, number, 1, tzinfo=UTC)
    next_ = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    low, high = (ulid(int(at.timestamp() * 1000) << 80) for at in (first, next_))
    return low, high


def partition_statement(table: str, month: str) -> str:
    """The statement that makes the partition of a month."""
    low, high = month_bounds(month)
    name = f"{table}_{month}"
    return f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF {table} FOR VALUES FROM ('{low}') TO ('{high}')"
