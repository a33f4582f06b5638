"""Months that a prune empties: their partitions are dropped, which takes no longer for many rows than for few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotune.integrations.collect.postgres.tables import month_bounds
from cotune.records.ids import ulid
from cotune.storage.sql.transaction import Transactions
from cotune.storage.sql.upkeep import delete_episodes

_WAIT = "2s"
"""How long a reader, such as a backup, may keep a partition from being dropped. Others cannot write meanwhile."""
_PARTITIONS = """SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent IN ('calls'::regclass, 'episodes'::regclass, 'rewards'::regclass)"""


def stored_months(db: Transactions) -> list[str]:
    """The months that have partitions of calls and of episodes, such as `2026_11`."""
    names = _partitions(db)
    return sorted(name[-7:] for name in names if name.startswith("episodes_2") and f"calls_{name[-7:]}" in names)


def drop_month(db: Transactions, month: str, before: float, app: str, keep_trained: bool) -> Mapping[str, int]:
    """Drop the partitions of a month, which is faster than deleting its rows. Returns the number of its episodes and
    calls.

    Nothing is dropped if a prune would keep an episode or a call of the month. Calls and their episode may lie in
    different months around midnight, so episodes across the border are deleted row by row first. Rewards whose episodes
    have not arrived by now go with their month.
    """
    low, high = month_bounds(month)  # the first id of the month, and of the next month
    # An id begins with the milliseconds of its time, before 80 random bits.
    first_id_to_keep = ulid(int(before * 1000) << 80)
    if high > first_id_to_keep or _must_keep(db, month, before, app, keep_trained):
        return {}

    # 1. Delete the episodes of this month that have calls in another month.
    calls_here = f"SELECT 1 FROM calls_{month} AS own WHERE own.episode = calls.episode"
    episode_here = f"SELECT 1 FROM episodes_{month} AS own WHERE id = episode"
    across_border = f"""SELECT DISTINCT episode FROM calls WHERE episode >= ? AND episode < ? AND (id < ? OR id >= ?)
        AND (EXISTS ({calls_here}) OR EXISTS ({episode_here}))"""
    episodes = [id for (id,) in db.execute(across_border, [low, high, low, high])]
    counts = dict(delete_episodes(db, episodes))

    # 2. Drop the partitions, after counting their rows.
    for table in ("episodes", "calls"):
        ((count,),) = db.execute(f"SELECT count(*) FROM {table}_{month}")
        counts[table] += count
    partitions = {f"{table}_{month}" for table in ("calls", "episodes", "rewards")} & _partitions(db)
    db.execute(f"SET LOCAL lock_timeout = '{_WAIT}'")
    db.execute(f"DROP TABLE {', '.join(sorted(partitions))}")

    # 3. Delete the rows of tables without partitions.
    for table in ("rewards", "feedback", "replaced", "consumed"):
        db.execute(f"DELETE FROM {table} WHERE target >= ? AND target < ?", [low, high])
    return counts


def _must_keep(db: Transactions, month: str, before: float, app: str, keep_trained: bool) -> bool:
    """Whether a prune would keep an episode or a call of this month.

    A prune keeps records that started at `before` or later, records of other applications than `app` if one is given,
    and, with `keep_trained`, episodes that training has used.
    """
    low, high = month_bounds(month)
    condition_to_keep = "(started >= ?)"
    parameters: list[Any] = [before]
    if app:
        condition_to_keep = "(started >= ? OR app != ?)"
        parameters.append(app)
    # 1. Calls and episodes of the month.
    kept_rows = [
        *db.execute(f"SELECT 1 FROM calls_{month} WHERE {condition_to_keep} LIMIT 1", parameters),
        *db.execute(f"SELECT 1 FROM episodes_{month} WHERE {condition_to_keep} LIMIT 1", parameters),
    ]
    if keep_trained:
        kept_rows += db.execute("SELECT 1 FROM consumed WHERE target >= ? AND target < ? LIMIT 1", [low, high])

    # 2. Episodes of other months that have calls in this one: their calls are kept with them.
    or_is_trained = ""
    if keep_trained:
        or_is_trained = " OR EXISTS (SELECT 1 FROM consumed WHERE target = episodes.id)"
    episodes_of_other_months = f"""SELECT 1 FROM episodes
        WHERE ({condition_to_keep}{or_is_trained}) AND NOT (id >= ? AND id < ?)
        AND EXISTS (SELECT 1 FROM calls_{month} AS own WHERE own.episode = episodes.id) LIMIT 1"""
    kept_rows += db.execute(episodes_of_other_months, [*parameters, low, high])
    return bool(kept_rows)


def _partitions(db: Transactions) -> set[str]:
    return {name for (name,) in db.execute(_PARTITIONS)}
