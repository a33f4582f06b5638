"""Looking after a store: counts by day, deleting, and copying from one to another."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from cotune.errors import RecordError
from cotune.records.ids import address, has_address, key_target
from cotune.records.images import image_id, join_images
from cotune.storage.protocol import Store
from cotune.storage.schema import COLUMNS, DAY, WRITTEN, NameList, Row, in_parts
from cotune.storage.sql.figures import AMONG, NO_END
from cotune.storage.sql.owners import among, episodes_with_keys
from cotune.storage.sql.transaction import Transactions

T = TypeVar("T")
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


class Upkeep:
    """The part of a store that counts by day, deletes and copies. `Store` documents each method."""

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Rows of any SELECT."""

    @abstractmethod
    def newest(self) -> tuple[int, int]:
        """Numbers of the last call and the last episode."""

    @abstractmethod
    def _act(self, do: Callable[[Transactions], T]) -> T:
        """Do something in a transaction of the writer's."""

    def tally(self, app: str = "") -> list[Row]:
        return self.rows(
            f"""SELECT app, role, coalesce(policy, ''), version, date(started, 'unixepoch') AS day, count(*),
                count(*) FILTER (WHERE status != 'ok'), sum(prompt_tokens), sum(completion_tokens)
            FROM calls {"WHERE app = ?" if app else ""} GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 5, 2, 3, 4""",
            [app] if app else [],
        )

    def apps(self) -> list[Row]:
        return self.rows(
            """SELECT app, count(*), count(*) FILTER (WHERE status = 'ok'), sum(calls), min(started), max(started),
                count(*) FILTER (WHERE EXISTS (SELECT 1 FROM rewards WHERE target = episodes.id))
            FROM episodes GROUP BY app ORDER BY app"""
        )

    def episodes_with_key(self, app: str, key: str) -> list[str]:
        return [id for (id,) in episodes_with_keys(self.rows, "id", app, [key], " ORDER BY id")]

    def key_counts(self, app: str, keys: Collection[str]) -> Mapping[str, int]:
        counted = episodes_with_keys(self.rows, "key, count(*)", app, keys, " GROUP BY key")
        return dict.fromkeys(keys, 0) | dict(counted)

    # Deleting

    def prune(self, before: float, *, app: str = "", keep_trained: bool = False) -> Iterator[Mapping[str, int]]:
        self._act(lambda does: does.widen())
        yield from self._drop_months(before, app, keep_trained)
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
            while page := [id for (id,) in self.rows(sql, [last, *asked])]:
                last = page[-1]
                yield self._act(partial(delete_episodes, ids=page))
        # What is used again is marked so within two days, by its writer and by the source of the records.
        bound = before - 2 * DAY
        unused = {
            table: dict.fromkeys(id for (id,) in self.rows(f"SELECT id FROM {table} WHERE at < ?", [bound]))
            for table in _USED
        }
        yield from self._sweep(unused, "WHERE started < ?", [before])

    def _drop_months(self, before: float, app: str, keep_trained: bool) -> Iterator[Mapping[str, int]]:
        """Delete months as wholes, where the store has them apart, that `prune` would delete row by row."""
        yield from ()

    def delete(self, episodes: Iterable[str], key: tuple[str, str] | None = None) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        unused: dict[str, dict[str, None]] = {table: {} for table in _USED}
        ids = list(episodes)
        for some in in_parts(ids):
            for table, names in self._act(partial(_named, ids=some)).items():
                unused[table].update(dict.fromkeys(names))
            counts.update(self._act(partial(delete_episodes, ids=some)))
        if key is not None:
            self._act(lambda does: delete_targets(does, [key_target(*key)]))
        for some in in_parts(unused["messages"]):
            for (body,) in among(self.rows, "SELECT body FROM messages", "id", some):
                unused["images"].update(dict.fromkeys(_IMAGE.findall(body)))
        for part in self._sweep(unused, "", []):
            counts.update(part)
        return counts

    def _sweep(
        self, unused: Mapping[str, dict[str, None]], where: str, asked: Sequence[Any]
    ) -> Iterator[Mapping[str, int]]:
        """Delete those messages, images and segments that nothing names which is still there, in their order: that of
        a table is quick. Calls and episodes that `where` chooses are looked through."""
        seen = self.newest()
        prompts = set()
        if any(unused.values()) and self.rows(f"SELECT 1 FROM calls {where} LIMIT 1", asked):
            for body, prompt in self._pages("calls", ("body", "prompt"), where, asked):
                _spare(unused["messages"], _STRING.findall(str(body)))
                prompts.add(prompt)
        if any(unused.values()):
            for (body,) in self._pages("episodes", ("body",), where, asked):
                _spare(unused["messages"], _STRING.findall(str(body)))
        if unused["images"]:
            for id, body in self._pages("messages", ("id", "body"), "WHERE body LIKE '%sha256,%'", []):
                if id not in unused["messages"]:
                    _spare(unused["images"], _IMAGE.findall(str(body)))
        if unused["segments"]:
            parents: dict[str, str | None] = dict(self._pages("segments", ("id", "parent"), "", []))
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
                yield self._act(partial(go, table=table, ids=ids[start : start + _SWEPT]))

    def _pages(self, table: str, columns: Sequence[str], where: str, asked: Sequence[Any]) -> Iterator[Row]:
        last = ""
        sql = f"""SELECT id, {", ".join(columns)} FROM {table} {where} {"AND" if where else "WHERE"} id > ?
            ORDER BY id LIMIT {4 * _PAGE}"""
        while page := self.rows(sql, [*asked, last]):
            yield from (tuple(row[1:]) for row in page)
            last = page[-1][0]

    # Copying

    def page(self, table: str, after: Sequence[Any], limit: int, *, keys_only: bool = False) -> list[Row]:
        keys = key_columns(table)
        columns = ", ".join(keys if keys_only else COLUMNS[table])
        where = f"WHERE ({', '.join(keys)}) > ({','.join('?' * len(keys))})" if after else ""
        return self.rows(f"SELECT {columns} FROM {table} {where} ORDER BY {', '.join(keys)} LIMIT ?", [*after, limit])

    def rows_of(self, table: str, ids: Iterable[str]) -> list[Row]:
        return among(self.rows, f"SELECT {', '.join(COLUMNS[table])} FROM {table}", key_columns(table)[0], ids)

    def having(self, table: str, ids: Iterable[str]) -> set[str]:
        return {id for (id,) in among(self.rows, f"SELECT id FROM {table}", "id", ids)}

    def size(self, table: str) -> int:
        return int(self.rows(f"SELECT count(*) FROM {table}")[0][0])

    def load(self, table: str, rows: Sequence[Row]) -> int:
        return self._act(lambda does: does.load(table, rows))

    def take_counters(self, source: str, counters: Mapping[str, int]) -> None:
        name = address(source.encode())[:16]
        self._act(lambda does: does.set_counters({f"{own} of {name}": value for own, value in counters.items()}))


_USED = ("messages", "images", "segments")


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
    copied = Copied()
    for table in COPIED:
        after: Sequence[Any] = ()
        while page := source.page(table, after, limit, keys_only=table in _FIXED):
            after = page[-1][: len(key_columns(table))] if table in _FIXED else _key_of(table, page[-1])
            if table in _FIXED:
                there = target.having(table, [id for (id,) in page])
                rows = source.rows_of(table, [id for (id,) in page if id not in there])
            else:
                rows = page
            genuine = [row for row in rows if _is_genuine(source, table, row)]
            copied.forged += len(rows) - len(genuine)
            if genuine:
                lost = target.load(table, genuine)
                copied.stored += len(genuine) - lost
                copied.lost += lost
            told(table, len(page))
    target.take_counters(source.address, source.counters())
    return copied


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
