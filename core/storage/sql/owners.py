"""Records of several applications in one transaction: who owns an episode, and which episodes a key names.

The first application that wrote a call or the end of an episode owns the episode. Records that another application
writes for it are left out, and so are calls with the id of another application's call. Rewards may come before their
episode: if they turn out to be another application's, they are deleted when the episode comes.
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
"""The index of the application in a row."""
_REWARDS = ("rewards", "feedback")
"""Tables whose rows name an episode, a candidate or a key as their target, in the first column."""
_KEY = COLUMNS["episodes"].index("key")
_DRAWN = COLUMNS["calls"].index("drawn")


def among(execute: Execute, select: str, column: str, names: Iterable[str], sql_suffix: str = "") -> list[Row]:
    """Rows of the query `select` in which a column has one of these names. `sql_suffix` follows the condition, for
    example an ORDER BY. Many names are cut into several queries, and it applies to each of them."""
    rows: list[Row] = []
    for part in in_parts(set(names)):
        marks = ",".join("?" * len(part))
        rows += execute(f"{select} WHERE {column} IN ({marks}){sql_suffix}", part)
    return rows


def leave_out_others(execute: Execute, tables: Tables) -> int:
    """Remove the records from `tables` that an application wrote for an episode of another one; return their number.

    Stored rewards from another application are deleted when their episode comes, and counted too.
    """
    calls = tables["calls"]
    episodes = tables["episodes"]
    rows_before = sum(map(len, tables.values()))

    # 1. The episode of each reward. Its target is the episode, or a candidate: the call's id, "." and a number.
    targets: set[str] = set()
    for table in _REWARDS:
        targets.update(row[0] for row in tables[table] if not row[0].startswith(KEY))
    call_of_target = {target: call for target in targets if (call := target.rpartition(".")[0])}
    new_calls = {row[0] for row in calls}
    stored_calls = among(execute, "SELECT id, episode, app FROM calls", "id", new_calls | {*call_of_target.values()})
    episode_of_call: dict[str, str] = {row[0]: row[1] for row in [*calls, *stored_calls]}
    episode_of_target: dict[str, str] = {}
    for target in targets:
        episode_of_target[target] = episode_of_call.get(call_of_target.get(target, ""), target)

    # 2. The owner of each episode: the application of its first stored record, else of its first new one.
    ids = {row[1] for row in calls} | {row[0] for row in episodes} | set(episode_of_target.values())
    owners: dict[str, str] = {}
    for id, app in among(execute, "SELECT episode, app FROM calls", "episode", ids, " ORDER BY rowid"):
        owners.setdefault(id, app)
    owners.update(among(execute, "SELECT id, app FROM episodes", "id", ids - owners.keys()))
    stored_episodes = set(owners)
    for row in calls:
        owners.setdefault(row[1], row[AT["calls"]])
    for row in episodes:
        owners.setdefault(row[0], row[AT["episodes"]])

    # 3. The new records that belong to their episode.
    def is_allowed(app: str, owner: str | None) -> bool:
        # A record without an application comes from this process, which may reward the episodes that it records.
        return not app or owner in (None, app)

    def owner_of_target(target: str) -> str | None:
        if target.startswith(KEY):
            return key_app(target)
        return owners.get(episode_of_target[target])

    app_of_stored_call = {id: app for id, _, app in stored_calls}
    allowed_calls: list[list[Any]] = []
    for row in calls:
        app = row[AT["calls"]]
        if is_allowed(app, owners[row[1]]) and is_allowed(app, app_of_stored_call.get(row[0])):
            allowed_calls.append(row)
    calls[:] = allowed_calls
    episodes[:] = [row for row in episodes if is_allowed(row[AT["episodes"]], owners[row[0]])]
    for table in _REWARDS:
        tables[table][:] = [row for row in tables[table] if is_allowed(row[AT[table]], owner_of_target(row[0]))]
    n_removed = rows_before - sum(map(len, tables.values()))

    # 4. Stored rewards that came before these records: of new episodes, and of the candidates of new calls.
    owner_of_new_target = {id: owners[id] for id in owners.keys() - stored_episodes}
    for row in calls:
        for index in range(row[_DRAWN]):
            owner_of_new_target[f"{row[0]}.{index}"] = owners[row[1]]
    return n_removed + _delete_rewards_of_others(execute, owner_of_new_target)


def _delete_rewards_of_others(execute: Execute, owner_of_target: Mapping[str, str]) -> int:
    """Delete the stored rewards and texts of these targets that an application other than their owner wrote. Returns
    their number."""
    n_deleted = 0
    for table in _REWARDS:
        for target, app in among(execute, f"SELECT target, app FROM {table}", "target", owner_of_target):
            if app not in ("", owner_of_target[target]):
                execute(f"DELETE FROM {table} WHERE target = ? AND app = ?", [target, app])
                n_deleted += 1
    return n_deleted


def join_keys(execute: Execute, tables: Tables) -> None:
    """Copy the rewards and texts whose target is a key to the episodes with this key, as new rows in `tables`.

    A key is a name that an application gives to an episode, for example the number of an order. New rewards are copied
    to stored and to new episodes, stored rewards only to new episodes.
    """
    # 1. Find the new episodes of each key. Rewards name a key by a target of their own (`key_target`).
    new_episodes: dict[str, list[str]] = {}
    for row in tables["episodes"]:
        id = row[0]
        app = row[AT["episodes"]]
        key = row[_KEY]
        if key:
            new_episodes.setdefault(key_target(app, key), []).append(id)

    # 2. Find all episodes, new and stored, of each key with a new reward.
    targets_of_keys: set[str] = set()
    for table in _REWARDS:
        targets = [row[0] for row in tables[table]]
        targets_of_keys.update(target for target in targets if target.startswith(KEY))
    episodes_of_target = {target: set(new_episodes.get(target, ())) for target in targets_of_keys}
    keys_of_app: dict[str, list[str]] = {}
    for target in targets_of_keys:
        app = key_app(target)
        key = target.removeprefix(key_target(app, ""))
        keys_of_app.setdefault(app, []).append(key)
    for app, keys in keys_of_app.items():
        for key, id in episodes_with_keys(execute, "key, id", app, keys):
            episodes_of_target[key_target(app, key)].add(id)

    # 3. Copy each new reward to all of its episodes, and each stored reward to the new ones. A copy has the episode as
    #    its target, and the same other columns.
    for table in _REWARDS:
        rows = tables[table]
        columns = ", ".join(COLUMNS[table])
        new_rewards = [row for row in rows if row[0].startswith(KEY)]
        for target, *other_columns in new_rewards:
            rows += [[id, *other_columns] for id in episodes_of_target[target]]
        stored_rewards = among(execute, f"SELECT {columns} FROM {table}", "target", new_episodes)
        for target, *other_columns in stored_rewards:
            rows += [[id, *other_columns] for id in new_episodes[target]]


def episodes_with_keys(
    execute: Execute, columns: str, app: str, keys: Iterable[str], sql_suffix: str = ""
) -> list[Row]:
    """Columns of the episodes of an application that have one of these keys. `sql_suffix` follows the condition of each
    query, for example a LIMIT.

    An episode is in the table only when it has ended.
    """
    rows: list[Row] = []
    for part in in_parts(set(keys)):
        marks = ",".join("?" * len(part))
        # The condition on the empty key lets the database use its index, which has only episodes with a key.
        sql = f"SELECT {columns} FROM episodes WHERE app = ? AND key != '' AND key IN ({marks}){sql_suffix}"
        rows += execute(sql, [app, *part])
    return rows
