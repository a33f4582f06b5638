"""Maintenance of records in SQL: delete them, and copy them from one store to another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cotune.errors import RecordError, RunError
from cotune.records.ids import address, candidate_id, has_address, key_target
from cotune.records.images import image_id, join_images
from cotune.storage.protocol import Store
from cotune.storage.schema import AMONG, COLUMNS, DAY, WRITTEN, NameList, Row, in_parts
from cotune.storage.sql.figures import NO_END
from cotune.storage.sql.owners import Execute, among
from cotune.storage.sql.store import SqlStore
from cotune.storage.sql.transaction import Transactions

_PAGE = 500
_EPISODES_DELETED = 2000
"""Episodes that one transaction deletes."""
_ROWS_SEARCHED = 2000
"""Rows that one query reads to find the uses of messages, images and segments."""
_ROWS_DELETED = 20_000
"""Messages, images or segments that one transaction deletes."""
_STRING = re.compile(r'"([^"\\]*)"')
_IMAGE = re.compile(r"sha256,([0-9a-f]{64})")
COPIED = (*WRITTEN, "replaced", "consumed")
_KEYS = {"rewards": ("target", "name"), "feedback": ("target", "name"), "replaced": ("target", "name", "at")}
_FIXED = ("images", "messages", "segments", "calls")
"""Tables whose rows never change: rows that the target has are not copied again."""
_SHARED = ("messages", "images", "segments")
"""Tables whose rows several calls and episodes may use."""


def _in_sql(store: Store) -> SqlStore[Any]:
    """The store as a `SqlStore`. Raises RunError if it is another kind of store."""
    if not isinstance(store, SqlStore):
        cause = f"{store.address} is not an SQL database, which this command needs."
        raise RunError(cause, "Keep the records in SQLite or PostgreSQL.")
    return store


def prune(store: Store, before: float, *, app: str = "", keep_trained: bool = False) -> Iterator[Mapping[str, int]]:
    """Delete the episodes that started before a time, and the messages, images and segments that nothing else uses.

    Yields the numbers of deleted rows by table, after each transaction. With `keep_trained`, episodes that a run was
    trained on stay.
    """
    sql_store = _in_sql(store)
    sql_store.act(lambda transaction: transaction.widen())  # many rows change: use more memory

    # 1. Whole months of episodes, if the database keeps each month in a table of its own.
    yield from sql_store.drop_months(before, app, keep_trained)

    # 2. The other episodes, many in each transaction.
    is_old = "started < ?"
    parameters: list[Any] = [before]
    if app:
        is_old += " AND app = ?"
        parameters.append(app)
    # An interrupted episode has calls, but no row in the table of episodes.
    and_untrained = ""
    and_interrupted_is_untrained = ""
    if keep_trained:
        and_untrained = "AND NOT EXISTS (SELECT 1 FROM consumed WHERE target = episodes.id)"
        and_interrupted_is_untrained = "AND NOT EXISTS (SELECT 1 FROM consumed WHERE target = found.episode)"
    finished = f"""SELECT id FROM episodes WHERE id > ? AND {is_old} {and_untrained}
        ORDER BY id LIMIT {_EPISODES_DELETED}"""
    interrupted = f"""SELECT episode FROM (SELECT DISTINCT episode FROM calls WHERE episode > ?) AS found
        WHERE {NO_END} AND EXISTS (SELECT 1 FROM calls WHERE calls.episode = found.episode AND {is_old})
        {and_interrupted_is_untrained} ORDER BY episode LIMIT {_EPISODES_DELETED}"""
    for sql in (finished, interrupted):
        last_id = ""
        while ids := [id for (id,) in sql_store.rows(sql, [last_id, *parameters])]:
            last_id = ids[-1]
            yield sql_store.act(partial(delete_episodes, ids=ids))

    # 3. The messages, images and segments that only they used. The time of last use (`at`) may be up to two days old:
    #    the writer and the source of the records each update it once a day. Rows that are older may be unused.
    bound = before - 2 * DAY
    unused: dict[str, dict[str, None]] = {}
    for table in _SHARED:
        rows = sql_store.rows(f"SELECT id FROM {table} WHERE at < ?", [bound])
        unused[table] = dict.fromkeys(id for (id,) in rows)
    yield from _delete_unused(sql_store, unused, where="WHERE started < ?", parameters=[before])


def delete(store: Store, episodes: Iterable[str], key: tuple[str, str] | None = None) -> Mapping[str, int]:
    """Delete episodes with everything that only they use. `key` is an application and one of its keys, whose rewards
    are deleted too.

    Returns the numbers of deleted rows by table. This reads all calls, to find messages that other episodes use.
    """
    sql_store = _in_sql(store)
    counts: Counter[str] = Counter()

    # 1. Delete the episodes, and remember the ids of the messages and segments that they used. `unused` has them by
    #    table, as the keys of a dictionary, which keeps their order.
    unused: dict[str, dict[str, None]] = {table: {} for table in _SHARED}
    for part in in_parts(episodes):
        used = sql_store.act(partial(_used_by_episodes, episodes=part))
        for table, ids in used.items():
            unused[table].update(dict.fromkeys(ids))
        counts.update(sql_store.act(partial(delete_episodes, ids=part)))
    if key is not None:
        sql_store.act(lambda transaction: delete_targets(transaction, [key_target(*key)]))

    # 2. Add the images in these messages.
    for part in in_parts(unused["messages"]):
        for (body,) in among(sql_store.rows, "SELECT body FROM messages", "id", part):
            unused["images"].update(dict.fromkeys(_IMAGE.findall(body)))

    # 3. Delete these messages, segments and images, except rows that another record uses.
    for deleted in _delete_unused(sql_store, unused, where="", parameters=[]):
        counts.update(deleted)
    return counts


def _delete_unused(
    store: SqlStore[Any], unused: Mapping[str, dict[str, None]], where: str, parameters: Sequence[Any]
) -> Iterator[Mapping[str, int]]:
    """Delete the messages, images and segments in `unused` that no remaining record uses.

    `unused` holds the ids of rows that may be unused, by table, as ordered sets: deleting in the order of the table is
    quick. Ids that turn out to be used are removed from it. The uses are searched in the calls and episodes that
    `where` chooses, with its `parameters`. Yields the number of deleted rows by table after each transaction.
    """
    newest_searched = store.figures().newest()
    _spare_used(store, unused, where, parameters)

    def delete_rows(transaction: Transactions, table: str, ids: Sequence[str]) -> Mapping[str, int]:
        """Delete the rows of `table` with these `ids`, except rows that a newer episode uses. Returns their number by
        table."""
        # Other processes may have written episodes since the search above. Spare the rows that these use.
        sql = "SELECT episode FROM calls WHERE rowid > ? UNION SELECT id FROM episodes WHERE rowid > ?"
        new_episodes = [id for (id,) in transaction.execute(sql, newest_searched)]
        if new_episodes:
            used = _used_by(transaction.execute, new_episodes)
            for used_table, used_ids in used.items():
                _spare(unused[used_table], used_ids)
            for (body,) in among(transaction.execute, "SELECT body FROM messages", "id", used["messages"]):
                _spare(unused["images"], _IMAGE.findall(str(body)))
        still_unused = [id for id in ids if id in unused[table]]
        transaction.execute(f"DELETE FROM {table} WHERE id {AMONG}", [NameList.of(still_unused)])
        transaction.forget()
        return {table: len(still_unused)}

    for table in unused:
        ids = list(unused[table])
        for start in range(0, len(ids), _ROWS_DELETED):
            yield store.act(partial(delete_rows, table=table, ids=ids[start : start + _ROWS_DELETED]))


def _spare_used(
    store: SqlStore[Any], unused: Mapping[str, dict[str, None]], where: str, parameters: Sequence[Any]
) -> None:
    """Remove the ids of rows that a record uses from `unused`, which has the ids of the rows to delete by table.

    `where` and its `parameters` choose the calls and episodes to search.
    """
    # 1. Messages that calls and episodes use. Any string in a record may be the id of a message.
    prompts: set[str] = set()
    if any(unused.values()) and store.rows(f"SELECT 1 FROM calls {where} LIMIT 1", parameters):
        for body, prompt in _pages(store, "calls", ("body", "prompt"), where, parameters):
            _spare(unused["messages"], _STRING.findall(str(body)))
            prompts.add(prompt)
    if any(unused.values()):
        for (body,) in _pages(store, "episodes", ("body",), where, parameters):
            _spare(unused["messages"], _STRING.findall(str(body)))

    # 2. Images that the remaining messages use.
    if unused["images"]:
        for id, body in _pages(store, "messages", ("id", "body"), "WHERE body LIKE '%sha256,%'", []):
            if id not in unused["messages"]:
                _spare(unused["images"], _IMAGE.findall(str(body)))

    # 3. Segments that prompts use, with all segments on their path to the root.
    if unused["segments"]:
        parents: dict[str, str | None] = dict(_pages(store, "segments", ("id", "parent"), "", []))
        used_segments = [id for id in parents if id in prompts or id not in unused["segments"]]
        for used_segment in used_segments:
            segment: str | None = used_segment
            while segment is not None and segment in parents:
                _spare(unused["segments"], [segment])
                segment = parents.pop(segment)  # popped, so that a shared beginning is walked only once


def _pages(
    store: SqlStore[Any], table: str, columns: Sequence[str], where: str, parameters: Sequence[Any]
) -> Iterator[Row]:
    """Columns of all rows of a table that `where` chooses, in the order of their ids. They are read in pages."""
    last_id = ""
    after_last_page = f"{where} AND id > ?" if where else "WHERE id > ?"
    sql = f"SELECT id, {', '.join(columns)} FROM {table} {after_last_page} ORDER BY id LIMIT {_ROWS_SEARCHED}"
    while page := store.rows(sql, [*parameters, last_id]):
        for id, *values in page:
            last_id = id
            yield tuple(values)


def page(store: Store, table: str, after: Sequence[Any], limit: int, *, keys_only: bool = False) -> list[Row]:
    """Rows of a table after a key, in the order of keys. With `keys_only`, only their keys."""
    sql_store = _in_sql(store)
    keys = key_columns(table)
    columns = ", ".join(keys if keys_only else COLUMNS[table])
    where = f"WHERE ({', '.join(keys)}) > ({','.join('?' * len(keys))})" if after else ""
    return sql_store.rows(f"SELECT {columns} FROM {table} {where} ORDER BY {', '.join(keys)} LIMIT ?", [*after, limit])


def _rows_of(store: SqlStore[Any], table: str, ids: Iterable[str], column: str = "") -> list[Row]:
    """The rows of a table with one of these ids in a column, which is the first of the key without a name."""
    by = column or key_columns(table)[0]
    return among(store.rows, f"SELECT {', '.join(COLUMNS[table])} FROM {table}", by, ids)


def size(store: Store, table: str) -> int:
    """Rows of a table."""
    sql_store = _in_sql(store)
    return int(sql_store.rows(f"SELECT count(*) FROM {table}")[0][0])


def key_columns(table: str) -> Sequence[str]:
    """The columns that identify a row of a table."""
    return _KEYS.get(table, COLUMNS[table][:1])


@dataclass
class Copied:
    """The numbers of rows that a copy stored, could not store (`lost`), and refused (`forged`).

    Forged are messages and images whose ids are not the hashes of their contents. The first content of an id is used
    for all calls that name it, so a forgery in one store would change the calls of another store.
    """

    stored: int = 0
    lost: int = 0
    forged: int = 0


def copy(source: Store, target: Store, progress: Callable[[str, int], None], limit: int = _PAGE) -> Copied:
    """Copy all records and counters of one store into another, a page at a time.

    Rows that the target has are skipped, so a copy that was stopped can be continued. After each page, `progress` is
    called with the table and the number of rows in the page.
    """
    sql_source = _in_sql(source)
    sql_target = _in_sql(target)
    copied = Copied()
    for table in COPIED:
        never_changes = table in _FIXED
        last_key: Sequence[Any] = ()
        while rows_or_keys := page(source, table, last_key, limit, keys_only=never_changes):
            if never_changes:
                # Only the ids were read. Read the rows that the target does not have.
                last_key = rows_or_keys[-1]
                ids = [id for (id,) in rows_or_keys]
                ids_in_target = {id for (id,) in among(sql_target.rows, f"SELECT id FROM {table}", "id", ids)}
                rows = _rows_of(sql_source, table, [id for id in ids if id not in ids_in_target])
            else:
                rows = rows_or_keys
                last_row = rows[-1]
                last_key = [last_row[COLUMNS[table].index(column)] for column in key_columns(table)]
            genuine = [row for row in rows if _is_genuine(source, table, row)]
            copied.forged += len(rows) - len(genuine)
            if genuine:
                lost = load(target, table, genuine)
                copied.stored += len(genuine) - lost
                copied.lost += lost
            progress(table, len(rows_or_keys))

    # The source's counters get names that contain the source, so that a second copy replaces them.
    source_name = address(source.address.encode())[:16]
    counters = {f"{counter} of {source_name}": count for counter, count in source.counters().items()}
    sql_target.act(lambda transaction: transaction.set_counters(counters))
    return copied


def copy_episodes(source: Store, target: Store, ids: Sequence[str]) -> None:
    """Copy episodes with their calls and rewards, and with the messages, images and segments that these use. Rows that
    the target has already are left out.

    Raises RunError if one of the stores is not in SQL. Raises RecordError if the id of a message or an image is not the
    hash of its content, or if the target cannot store a record.
    """
    sql_source = _in_sql(source)

    # 1. Read the rows of all tables. The target of a reward is an episode, or a candidate of a call.
    targets = list(ids)
    for call, drawn in among(sql_source.rows, "SELECT id, drawn FROM calls", "episode", ids):
        targets += [candidate_id(call, index) for index in range(drawn)]
    used = _used_by(sql_source.rows, ids)
    messages = _rows_of(sql_source, "messages", used["messages"])
    images: set[str] = set()
    for row in messages:
        images.update(_IMAGE.findall(str(row)))
    by_table = {
        "images": _rows_of(sql_source, "images", images),
        "messages": messages,
        "segments": _rows_of(sql_source, "segments", used["segments"]),
        "calls": _rows_of(sql_source, "calls", ids, "episode"),
        "episodes": _rows_of(sql_source, "episodes", ids),
        "rewards": _rows_of(sql_source, "rewards", targets),
        "feedback": _rows_of(sql_source, "feedback", targets),
    }

    # 2. Write them.
    for table, table_rows in by_table.items():
        if not all(_is_genuine(source, table, row) for row in table_rows):
            cause = f"{source.address} has {table} whose ids are not the hashes of their contents."
            raise RecordError(cause, "Somebody changed these records. Copy other episodes.")
        lost = load(target, table, table_rows)
        if lost:
            cause = f"{target.address} could not store {lost} of {len(table_rows)} rows of {table}."
            raise RecordError(cause, "Copy the records into an empty folder, or leave these episodes out.")


def load(store: Store, table: str, rows: Sequence[Row]) -> int:
    """Add rows of another store and return the number that could not be stored. Rewards are added even if their group
    has been consumed."""
    sql_store = _in_sql(store)
    return sql_store.act(lambda transaction: transaction.load(table, rows))


def _is_genuine(source: Store, table: str, row: Row) -> bool:
    """Whether the id of a message or an image is the hash of its content. Other rows count as genuine."""
    values = dict(zip(COLUMNS[table], row, strict=True))
    if table == "images":
        data = values["data"]
        return isinstance(data, bytes) and image_id(data) == values["id"]
    if table == "messages":
        try:
            message = join_images(msgspec.json.decode(values["body"]), source.image)
            return has_address(values["id"], message)
        except (msgspec.DecodeError, RecordError, TypeError, ValueError, RecursionError):
            return False
    return True


def _spare(unused: dict[str, None], ids: Iterable[str]) -> None:
    """Remove `ids`, which are used, from the rows that may be deleted."""
    for id in ids:
        unused.pop(id, None)


def delete_episodes(transaction: Transactions, ids: Sequence[str]) -> Mapping[str, int]:
    """Delete episodes with their calls and rewards; return the numbers of episodes and calls."""
    parameters = [NameList.of(ids)]
    calls = transaction.execute(f"SELECT id, drawn FROM calls WHERE episode {AMONG}", parameters)
    ((n_episodes,),) = transaction.execute(f"SELECT count(*) FROM episodes WHERE id {AMONG}", parameters)
    # Rewards name an episode, a call or a candidate of a call as their target.
    targets = [*ids]
    for call, drawn in calls:
        targets.append(call)
        targets += [candidate_id(call, index) for index in range(drawn)]
    delete_targets(transaction, targets)
    transaction.execute(f"DELETE FROM calls WHERE episode {AMONG}", parameters)
    transaction.execute(f"DELETE FROM episodes WHERE id {AMONG}", parameters)
    return {"episodes": n_episodes, "calls": len(calls)}


def _used_by_episodes(transaction: Transactions, episodes: Sequence[str]) -> dict[str, set[str]]:
    return _used_by(transaction.execute, episodes)


def _used_by(execute: Execute, episodes: Sequence[str]) -> dict[str, set[str]]:
    """The ids of messages and segments that episodes and their calls use, by table."""
    calls = among(execute, "SELECT body, prompt FROM calls", "episode", episodes)
    ended = among(execute, "SELECT body FROM episodes", "id", episodes)
    # Any string in a record may be the id of a message.
    strings: set[str] = set()
    for body, *_ in [*calls, *ended]:
        strings.update(_STRING.findall(str(body)))
    used: dict[str, set[str]] = {table: set() for table in _SHARED}
    used["messages"] = {id for (id,) in among(execute, "SELECT id FROM messages", "id", strings)}
    # A prompt is a path of segments: the last one, its parent, and so on to the root.
    segments = {prompt for _, prompt in calls if prompt}
    while segments:
        used["segments"] |= segments
        parents = among(execute, "SELECT parent FROM segments", "id", segments)
        segments = {parent for (parent,) in parents if parent is not None} - used["segments"]
    return used


def delete_targets(transaction: Transactions, targets: Sequence[str]) -> None:
    """Delete all rewards and texts of these targets, and the marks that they were trained on."""
    for table in ("rewards", "feedback", "replaced", "consumed"):
        transaction.execute(f"DELETE FROM {table} WHERE target {AMONG}", [NameList.of(targets)])
