"""Looking after records in SQL: deleting them, and copying them from one store to another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cotune.errors import RecordError, RunError
from cotune.records.ids import address, has_address, key_target
from cotune.records.images import image_id, join_images
from cotune.storage.protocol import Store
from cotune.storage.schema import AMONG, COLUMNS, DAY, WRITTEN, NameList, Row, in_parts
from cotune.storage.sql.figures import NO_END
from cotune.storage.sql.owners import among
from cotune.storage.sql.store import SqlStore
from cotune.storage.sql.transaction import Transactions

_PAGE = 500
_DELETED = 2000
"""Episodes that a transaction deletes."""
_SWEPT = 20_000
"""Messages, images or segments that a transaction deletes."""
_STRING = re.compile(r'"([^"\\]*)"')
_IMAGE = re.compile(r"sha256,([0-9a-f]{64})")
COPIED = (*WRITTEN, "replaced", "consumed")
_KEYS = {"rewards": ("target", "name"), "feedback": ("target", "name"), "replaced": ("target", "name", "at")}
_FIXED = ("images", "messages", "segments", "calls")
"""Tables whose rows never change: what the other store has of them is not copied again."""
_USED = ("messages", "images", "segments")


def _in_sql(store: Store) -> SqlStore[Any]:
    """The store as one over SQL. Raises RunError if it is another."""
    if not isinstance(store, SqlStore):
        raise RunError(f"{store.address} is not in SQL, which this needs.", "Keep the records in SQLite or PostgreSQL.")
    return store


def prune(store: Store, before: float, *, app: str = "", keep_trained: bool = False) -> Iterator[Mapping[str, int]]:
    """Delete what started before a time, and the messages that nothing else names; yield the numbers of rows of each
    transaction by table. Episodes that a run was trained on may be kept."""
    sql_store = _in_sql(store)
    sql_store.act(lambda does: does.widen())
    yield from sql_store.drop_months(before, app, keep_trained)
    chosen = "started < ?" + (" AND app = ?" if app else "")
    asked = [before, *([app] if app else [])]
    kept = " AND NOT EXISTS (SELECT 1 FROM consumed WHERE target = {})" if keep_trained else ""
    ended = f"""SELECT id FROM episodes WHERE id > ? AND {chosen}{kept.format("episodes.id")}
        ORDER BY id LIMIT {_DELETED}"""
    cut_off = f"""SELECT episode FROM (SELECT DISTINCT episode FROM calls WHERE episode > ?) AS found
        WHERE {NO_END} AND EXISTS (SELECT 1 FROM calls WHERE calls.episode = found.episode AND {chosen})
        {kept.format("found.episode")} ORDER BY episode LIMIT {_DELETED}"""
    for sql in (ended, cut_off):
        last = ""
        while ids := [id for (id,) in sql_store.rows(sql, [last, *asked])]:
            last = ids[-1]
            yield sql_store.act(partial(delete_episodes, ids=ids))
    # What is used again is marked so within two days, by its writer and by the source of the records.
    bound = before - 2 * DAY
    unused = {
        table: dict.fromkeys(id for (id,) in sql_store.rows(f"SELECT id FROM {table} WHERE at < ?", [bound]))
        for table in _USED
    }
    yield from _sweep(sql_store, unused, "WHERE started < ?", [before])


def delete(store: Store, episodes: Iterable[str], key: tuple[str, str] | None = None) -> Mapping[str, int]:
    """Delete episodes with all that belongs to them alone, and the rewards of an application and its key; return the
    numbers of rows by table. All calls are looked through for messages that others share."""
    sql_store = _in_sql(store)
    counts: Counter[str] = Counter()
    unused: dict[str, dict[str, None]] = {table: {} for table in _USED}
    ids = list(episodes)
    for some in in_parts(ids):
        for table, names in sql_store.act(partial(_named, ids=some)).items():
            unused[table].update(dict.fromkeys(names))
        counts.update(sql_store.act(partial(delete_episodes, ids=some)))
    if key is not None:
        sql_store.act(lambda does: delete_targets(does, [key_target(*key)]))
    for some in in_parts(unused["messages"]):
        for (body,) in among(sql_store.rows, "SELECT body FROM messages", "id", some):
            unused["images"].update(dict.fromkeys(_IMAGE.findall(body)))
    for part in _sweep(sql_store, unused, "", []):
        counts.update(part)
    return counts


def _sweep(
    store: SqlStore[Any], unused: Mapping[str, dict[str, None]], where: str, asked: Sequence[Any]
) -> Iterator[Mapping[str, int]]:
    """Delete those messages, images and segments that nothing names which is still there, in their order: that of
    a table is quick. Calls and episodes that `where` chooses are looked through."""
    seen = store.figures().newest()
    prompts = set()
    if any(unused.values()) and store.rows(f"SELECT 1 FROM calls {where} LIMIT 1", asked):
        for body, prompt in _pages(store, "calls", ("body", "prompt"), where, asked):
            _spare(unused["messages"], _STRING.findall(str(body)))
            prompts.add(prompt)
    if any(unused.values()):
        for (body,) in _pages(store, "episodes", ("body",), where, asked):
            _spare(unused["messages"], _STRING.findall(str(body)))
    if unused["images"]:
        for id, body in _pages(store, "messages", ("id", "body"), "WHERE body LIKE '%sha256,%'", []):
            if id not in unused["messages"]:
                _spare(unused["images"], _IMAGE.findall(str(body)))
    if unused["segments"]:
        parents: dict[str, str | None] = dict(_pages(store, "segments", ("id", "parent"), "", []))
        for leaf in [id for id in parents if id in prompts or id not in unused["segments"]]:
            at: str | None = leaf
            while at is not None and at in parents:
                _spare(unused["segments"], [at])
                at = parents.pop(at)

    def go(does: Transactions, table: str, ids: Sequence[str]) -> Mapping[str, int]:
        sql = "SELECT episode FROM calls WHERE rowid > ? UNION SELECT id FROM episodes WHERE rowid > ?"
        if came := [id for (id,) in does.execute(sql, seen)]:  # from other processes, since this looked
            named = _named(does, came)
            for used, names in named.items():
                _spare(unused[used], names)
            for (body,) in among(does.execute, "SELECT body FROM messages", "id", named["messages"]):
                _spare(unused["images"], _IMAGE.findall(str(body)))
        going = [id for id in ids if id in unused[table]]
        does.execute(f"DELETE FROM {table} WHERE id {AMONG}", [NameList.of(going)])
        does.forget()
        return {table: len(going)}

    for table, found in unused.items():
        ids = list(found)
        for start in range(0, len(ids), _SWEPT):
            yield store.act(partial(go, table=table, ids=ids[start : start + _SWEPT]))


def _pages(store: SqlStore[Any], table: str, columns: Sequence[str], where: str, asked: Sequence[Any]) -> Iterator[Row]:
    last = ""
    sql = f"""SELECT id, {", ".join(columns)} FROM {table} {where} {"AND" if where else "WHERE"} id > ?
        ORDER BY id LIMIT {4 * _PAGE}"""
    while page := store.rows(sql, [*asked, last]):
        yield from (tuple(row[1:]) for row in page)
        last = page[-1][0]


def page(store: Store, table: str, after: Sequence[Any], limit: int, *, keys_only: bool = False) -> list[Row]:
    """Rows of a table after a key, in the order of keys; or their keys alone."""
    sql_store = _in_sql(store)
    keys = key_columns(table)
    columns = ", ".join(keys if keys_only else COLUMNS[table])
    where = f"WHERE ({', '.join(keys)}) > ({','.join('?' * len(keys))})" if after else ""
    return sql_store.rows(f"SELECT {columns} FROM {table} {where} ORDER BY {', '.join(keys)} LIMIT ?", [*after, limit])


def _rows_of(store: SqlStore[Any], table: str, ids: Iterable[str]) -> list[Row]:
    return among(store.rows, f"SELECT {', '.join(COLUMNS[table])} FROM {table}", key_columns(table)[0], ids)


def _ids_in(store: SqlStore[Any], table: str, ids: Iterable[str]) -> set[str]:
    return {id for (id,) in among(store.rows, f"SELECT id FROM {table}", "id", ids)}


def size(store: Store, table: str) -> int:
    """Rows of a table."""
    sql_store = _in_sql(store)
    return int(sql_store.rows(f"SELECT count(*) FROM {table}")[0][0])


def key_columns(table: str) -> Sequence[str]:
    """The columns that tell rows of a table apart."""
    return _KEYS.get(table, COLUMNS[table][:1])


@dataclass
class Copied:
    """How many rows a copy has stored, could not store (`lost`), and refused: messages and images whose ids are not the
    hashes of their contents (`forged`). The first content of an id stands for all later ones, so one store's forgery
    would change what another store's calls say."""

    stored: int = 0
    lost: int = 0
    forged: int = 0


def copy(source: Store, target: Store, told: Callable[[str, int], None], limit: int = _PAGE) -> Copied:
    """Copy all records and counters of one store into another, a page at a time; what is there is left out, so that a
    copy that was stopped goes on. `told` hears the table and how many of its rows are done."""
    sql_source, sql_target = _in_sql(source), _in_sql(target)
    copied = Copied()
    for table in COPIED:
        after: Sequence[Any] = ()
        while some := page(source, table, after, limit, keys_only=table in _FIXED):
            after = some[-1][: len(key_columns(table))] if table in _FIXED else _key_of(table, some[-1])
            if table in _FIXED:
                there = _ids_in(sql_target, table, [id for (id,) in some])
                rows = _rows_of(sql_source, table, [id for (id,) in some if id not in there])
            else:
                rows = some
            genuine = [row for row in rows if _is_genuine(source, table, row)]
            copied.forged += len(rows) - len(genuine)
            if genuine:
                lost = load(target, table, genuine)
                copied.stored += len(genuine) - lost
                copied.lost += lost
            told(table, len(some))
    _take_counters(target, source)
    return copied


def load(store: Store, table: str, rows: Sequence[Row]) -> int:
    """Add rows of another store, also for targets that take no rewards any more; return how many were not stored."""
    sql_store = _in_sql(store)
    return sql_store.act(lambda does: does.load(table, rows))


def _take_counters(target: Store, source: Store) -> None:
    """Count what the source has counted as well, in place of what was taken from it before."""
    name = address(source.address.encode())[:16]
    counters = {f"{counter} of {name}": count for counter, count in source.counters().items()}
    _in_sql(target).act(lambda does: does.set_counters(counters))


def _is_genuine(source: Store, table: str, row: Row) -> bool:
    """Whether the id of a message or an image is the hash of its content. Other rows count as genuine."""
    if table == "images":
        id, data = (row[COLUMNS[table].index(column)] for column in ("id", "data"))
        return isinstance(data, bytes) and image_id(data) == id
    if table == "messages":
        id, text = (row[COLUMNS[table].index(column)] for column in ("id", "body"))
        try:
            return has_address(id, join_images(msgspec.json.decode(text), source.image))
        except (msgspec.DecodeError, RecordError, TypeError, ValueError, RecursionError):
            return False
    return True


def _key_of(table: str, row: Row) -> Row:
    return tuple(row[COLUMNS[table].index(column)] for column in key_columns(table))


def _spare(unused: dict[str, None], names: Iterable[str]) -> None:
    for name in names:
        unused.pop(name, None)


def delete_episodes(does: Transactions, ids: Sequence[str]) -> Mapping[str, int]:
    """Delete episodes with their calls and rewards; return how many rows."""
    asked = [NameList.of(ids)]
    calls = does.execute(f"SELECT id, drawn FROM calls WHERE episode {AMONG}", asked)
    ((ended,),) = does.execute(f"SELECT count(*) FROM episodes WHERE id {AMONG}", asked)
    delete_targets(does, [*ids, *(id for id, _ in calls), *(f"{id}.{n}" for id, drawn in calls for n in range(drawn))])
    does.execute(f"DELETE FROM calls WHERE episode {AMONG}", asked)
    does.execute(f"DELETE FROM episodes WHERE id {AMONG}", asked)
    return {"episodes": ended, "calls": len(calls)}


def _named(does: Transactions, ids: Sequence[str]) -> dict[str, set[str]]:
    """The messages and segments that episodes and their calls name."""
    calls = among(does.execute, "SELECT body, prompt FROM calls", "episode", ids)
    ended = among(does.execute, "SELECT body FROM episodes", "id", ids)
    names = {name for body, *_ in [*calls, *ended] for name in _STRING.findall(str(body))}
    used: dict[str, set[str]] = {table: set() for table in _USED}
    used["messages"] = {id for (id,) in among(does.execute, "SELECT id FROM messages", "id", names)}
    prompts = {prompt for _, prompt in calls if prompt}
    while prompts:
        used["segments"] |= prompts
        found = among(does.execute, "SELECT parent FROM segments", "id", prompts)
        prompts = {parent for (parent,) in found if parent is not None} - used["segments"]
    return used


def delete_targets(does: Transactions, targets: Sequence[str]) -> None:
    """Delete all rewards, texts and marks of training of these targets."""
    for table in ("rewards", "feedback", "replaced", "consumed"):
        does.execute(f"DELETE FROM {table} WHERE target {AMONG}", [NameList.of(targets)])
