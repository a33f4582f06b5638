"""Records of several applications in one transaction: whose episode is it, and which episodes does a key name?

The first application that wrote a call or the end of an episode owns it. Records that another one writes for it are
left out, and so are calls under the id of another one's call. Rewards may come before their episode: those of another
application are taken back when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cotune.records.ids import KEY, key_app, key_target
from cotune.storage.schema import COLUMNS, Row, in_parts

Execute = Callable[[str, Sequence[Any]], list[Row]]
Tables = Mapping[str, list[list[Any]]]
"""Rows of each table."""

AT = {table: COLUMNS[table].index("app") for table in ("calls", "episodes", "rewards", "feedback")}
"""Where the application stands in a row."""
_KEY = COLUMNS["episodes"].index("key")
_DRAWN = COLUMNS["calls"].index("drawn")


def among(execute: Execute, select: str, column: str, names: Iterable[str], more: str = "") -> list[Row]:
    """Rows of `select` where a column is one of these names."""
    found: list[Row] = []
    for some in in_parts(set(names)):
        found += execute(f"{select} WHERE {column} IN ({','.join('?' * len(some))}){more}", some)
    return found


def leave_out_others(execute: Execute, tables: Tables) -> int:
    """Take the records out of `tables` that belong to an episode of another application than their own; return how
    many. Rewards that are stored already, and that another application gave, are deleted as their episodes come."""
    calls, episodes = tables["calls"], tables["episodes"]
    given = [row for table in ("rewards", "feedback") for row in tables[table]]
    targets = {row[0] for row in given if not row[0].startswith(KEY)}
    parents = {target: call for target in targets if (call := target.rpartition(".")[0])}
    coming = {row[0] for row in calls}
    stored = among(execute, "SELECT id, episode, app FROM calls", "id", coming | {*parents.values()})
    taken = {id: app for id, _, app in stored}
    of_call: dict[str, str] = {row[0]: row[1] for row in [*calls, *stored]}
    episode_of = {target: of_call.get(parents.get(target, ""), target) for target in targets}
    ids = {row[1] for row in calls} | {row[0] for row in episodes} | set(episode_of.values())
    owners: dict[str, str] = {}
    for id, app in among(execute, "SELECT episode, app FROM calls", "episode", ids, " ORDER BY rowid"):
        owners.setdefault(id, app)
    owners.update(among(execute, "SELECT id, app FROM episodes", "id", ids - owners.keys()))
    known = set(owners)
    for id, app in [(row[1], row[AT["calls"]]) for row in calls] + [(row[0], row[AT["episodes"]]) for row in episodes]:
        owners.setdefault(id, app)
    arriving = owners.keys() - known
    before = sum(map(len, tables.values()))

    def owner_of(target: str) -> str | None:
        return key_app(target) if target.startswith(KEY) else owners.get(episode_of[target])

    owner: dict[str, Callable[[list[Any]], str | None]] = {
        "calls": lambda row: owners[row[1]],
        "episodes": lambda row: owners[row[0]],
        **dict.fromkeys(("rewards", "feedback"), lambda row: owner_of(row[0])),
    }
    for table, of in owner.items():
        at = AT[table]
        # A record without an application is one of the process's own, which may reward what it records.
        tables[table][:] = [row for row in tables[table] if not row[at] or of(row) in (None, row[at])]
    calls[:] = [row for row in calls if row[AT["calls"]] in ("", taken.get(row[0], row[AT["calls"]]))]
    early = {id: owners[id] for id in arriving}
    early |= {f"{row[0]}.{i}": owners[row[1]] for row in calls for i in range(row[_DRAWN])}
    refused = before - sum(map(len, tables.values()))
    for table in ("rewards", "feedback"):
        for target, app in among(execute, f"SELECT target, app FROM {table}", "target", early):
            if app not in ("", early[target]):
                execute(f"DELETE FROM {table} WHERE target = ? AND app = ?", [target, app])
                refused += 1
    return refused


def join_keys(execute: Execute, tables: Tables) -> None:
    """Add the rewards and texts that a key of the application gives its episodes: those that come now, for episodes
    that are there, and those that are there, for episodes that come now."""
    coming: dict[str, list[str]] = {}
    for row in tables["episodes"]:
        if row[_KEY]:
            coming.setdefault(key_target(row[AT["episodes"]], row[_KEY]), []).append(row[0])
    given = {row[0] for table in ("rewards", "feedback") for row in tables[table] if row[0].startswith(KEY)}
    episodes_of: dict[str, set[str]] = {target: {*coming.get(target, ())} for target in given}
    keys_of_apps: dict[str, list[str]] = {}
    for target in given:
        app = key_app(target)
        keys_of_apps.setdefault(app, []).append(target.removeprefix(key_target(app, "")))
    for app, keys in keys_of_apps.items():
        for key, id in episodes_with_keys(execute, "key, id", app, keys):
            episodes_of[key_target(app, key)].add(id)
    for table in ("rewards", "feedback"):
        rows, columns = tables[table], ", ".join(COLUMNS[table])
        for row in [row for row in rows if row[0].startswith(KEY)]:
            rows += [[id, *row[1:]] for id in episodes_of[row[0]]]
        for stored in among(execute, f"SELECT {columns} FROM {table}", "target", coming):
            rows += [[id, *stored[1:]] for id in coming[stored[0]]]


def episodes_with_keys(execute: Execute, columns: str, app: str, keys: Iterable[str], more: str = "") -> list[Row]:
    """Columns of the finished episodes of an application that have one of these keys."""
    found: list[Row] = []
    for some in in_parts(set(keys)):
        marks = ",".join("?" * len(some))
        sql = f"SELECT {columns} FROM episodes WHERE app = ? AND key != '' AND key IN ({marks}){more}"
        found += execute(sql, [app, *some])
    return found
