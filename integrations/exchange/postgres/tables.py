"""The tables of `core/storage/schema.py` in PostgreSQL, and the few words of SQLite's dialect that it lacks."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from cotune.records.ids import ulid
from cotune.storage.schema import ADD_APP, COLUMNS, CONFLICTS, FIGURES, INDEXES, TABLES, VERSION

LOCK = 0x636F7475
"""Advisory lock of the one transaction that writes."""

TYPES = {"TEXT": "text", "BLOB": "bytea", "REAL": "float8", "INTEGER": "int4"}
"""PostgreSQL's types by SQLite's."""

NUMBERED = ("calls", "episodes", "rewards")
"""Tables whose rows have a number, `rowid`, in the order of their commits. They are partitioned by the month of their
ids, which begin with their time."""


def _columns(table: str) -> str:
    columns = []
    for column in TABLES[table]:
        name, _, rest = column.partition(" ")
        kind, _, more = rest.partition(" ")
        type_ = {"TEXT": 'text COLLATE "C"', "INTEGER": "bigint" if table == "counters" else "int4"}.get(
            kind, TYPES.get(kind, kind)
        )
        columns.append(f"{name} {type_} {more}" if name != "PRIMARY" else column)
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
"""Those of SQLite's functions that queries use."""

SCHEMA = f"""
CREATE TABLE store (version int4 NOT NULL);
INSERT INTO store VALUES ({VERSION});
{" ".join(map(_table, TABLES))}
{INDEXES}
{FIGURES}
{_FUNCTIONS}
CREATE VIEW candidates AS
    SELECT calls.id || '.' || (value ->> 'index') AS id, calls.id AS call, calls.episode, calls.role, calls.turn,
           (value ->> 'index')::int4 AS "index", value ->> 'text' AS text, (value ->> 'tokens')::int4 AS tokens,
           coalesce(value ->> 'finish_reason', 'stop') AS finish_reason,
           value ->> 'index' IS NOT DISTINCT FROM calls.body::json ->> 'chosen' AS chosen
    FROM calls, json_array_elements(calls.candidates::json) AS value;
"""

UPGRADES = {
    4: f"{ADD_APP} {_FUNCTIONS} UPDATE store SET version = 5;",
    5: f"{FIGURES} UPDATE store SET version = {VERSION};",
}
"""What brings a store of a version to the next one."""


def stage(table: str) -> str:
    """The temporary table that rows are copied to before they are inserted."""
    columns = f"SELECT {', '.join(COLUMNS[table])} FROM {table} WHERE false"
    return f"CREATE TEMPORARY TABLE IF NOT EXISTS stage_{table} ON COMMIT DELETE ROWS AS {columns}"


def insertion(table: str) -> str:
    """The statement that takes the rows from there."""
    columns = ", ".join(COLUMNS[table])
    conflict = CONFLICTS[table].format(next="excluded.rowid")
    return f"INSERT INTO {table} ({columns}) SELECT {columns} FROM stage_{table} {conflict}"


def translated(sql: str) -> str:
    """A query in SQLite's dialect as psycopg takes it; LIKE does not distinguish cases there."""
    return sql.replace("%", "%%").replace("?", "%s").replace(" LIKE ", " ILIKE ")


_ULID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{9}")
_DIGITS = {digit: number for number, digit in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
_EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)


def month_of(id: str, now: datetime) -> str | None:
    """The month in which an id was made, as `2026_11`; None for an id that tells no time, or one that is unlikely."""
    if not _ULID.match(id):
        return None
    milliseconds = 0
    for digit in id[:10]:
        milliseconds = milliseconds << 5 | _DIGITS[digit]
    if not _EARLIEST.timestamp() * 1000 <= milliseconds <= now.timestamp() * 1000 + 86_400_000:
        return None
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y_%m}"


def bounds(month: str) -> tuple[str, str]:
    """The lowest id of a month, and that of the next one."""
    year, number = map(int, month.split("_"))
    first = datetime(year, number, 1, tzinfo=UTC)
    next_ = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    low, high = (ulid(int(at.timestamp() * 1000) << 80) for at in (first, next_))
    return low, high


def partition(table: str, month: str) -> str:
    """The statement that makes the partition of a month."""
    low, high = bounds(month)
    name = f"{table}_{month}"
    return f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF {table} FOR VALUES FROM ('{low}') TO ('{high}')"
