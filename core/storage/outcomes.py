"""The outcomes of recorded episodes, in SQL, the same for all readers: success, and means and sums of their rewards.

A failed episode counts as unsolved. It counts with its own rewards; without any, with the reward of the setting
`on_failure` (`OnFailure`).
"""

from __future__ import annotations

import contextlib
import math
from typing import Literal, cast

OnFailure = float | Literal["lowest", "exclude"]
"""The reward of a failed episode."""

IS_OUTCOME = "(status = 'ok' OR status = 'error' AND coalesce(blame, 'policy') = 'policy')"
"""Whether the outcome of an episode depends on its policies. It does not if the infrastructure failed."""
_FAILED = f"status = 'error' AND {IS_OUTCOME}"
REWARD_SUM = "(SELECT sum(value) FROM rewards WHERE target = episodes.id)"
"""The sum of an episode's rewards; NULL without rewards."""
ALL_OWN = """LEFT JOIN
    (SELECT target, sum(value) AS own FROM rewards WHERE instr(target, '.') = 0 GROUP BY target) AS given
    ON given.target = episodes.id"""
"""A join that gives each episode the sum of its rewards as `own`. For all episodes it is faster than `REWARD_SUM`."""

_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}

REPORTED = """CASE WHEN status = 'ok' THEN CASE WHEN success >= 0.5 THEN 1 WHEN success IS NOT NULL THEN 0 END
    WHEN success IS NOT NULL THEN 0 END"""
"""Whether an episode reports that it solved its task (`Episode.solved`). NULL if it reports no `success`."""


def solved(reward_sum: str = REWARD_SUM) -> str:
    """An SQL expression: whether an episode counts as solved in a phase that reports `success`.

    A failed episode counts as unsolved, and so does one that reports only rewards. The expression is NULL if the
    outcome is unknown: the infrastructure failed, or the episode reports neither success nor a reward. `reward_sum` is
    the expression for the sum of its rewards.
    """
    zero_if_rewarded = f"CASE WHEN {reward_sum} IS NOT NULL THEN 0 END"
    if_known = f"CASE WHEN status != 'ok' THEN 0 ELSE coalesce({REPORTED}, {zero_if_rewarded}) END"
    return f"CASE WHEN {IS_OUTCOME} THEN {if_known} END"


def failure_reward(on_failure: str) -> OnFailure:
    """The value of the setting `on_failure`: `lowest`, `exclude`, or the number in `reward:<number>`. Raises
    ValueError."""
    if on_failure in ("lowest", "exclude"):
        return cast(OnFailure, on_failure)
    kind, _, number = on_failure.partition(":")
    with contextlib.suppress(ValueError):
        if kind == "reward" and math.isfinite(float(number)):
            return float(number)
    raise ValueError(f"on_failure = {on_failure!r} is neither lowest, exclude nor reward:<number>")


def metric(value: object) -> float | None:
    """A reported metric as a number: True and the words true and yes are 1, False and the words false and no are 0.
    None for a value that is no number."""
    if isinstance(value, str):
        return _WORDS.get(value.lower())
    if isinstance(value, int | float):  # also a bool, which is an int
        return float(value)
    return None


def success_counts(where: str = "true") -> str:
    """A query for how many episodes of each phase solved their task, over the episodes that `where` chooses.

    It has a row for each phase in which an episode reports `success`. The columns are the phase, the number of solved
    episodes, the number n of episodes whose outcome is known, and the sum over tasks of the square of the task's n,
    for the interval of the share (`SuccessCount`).
    """
    phases_with_success = "SELECT DISTINCT phase FROM episodes WHERE success IS NOT NULL"
    # `solved` is NULL for an episode whose outcome is unknown, and `reported` for one that reports no `success`.
    episodes = f"""SELECT id, phase, task, {solved()} AS solved, {REPORTED} AS reported FROM episodes
        WHERE {where} AND phase IN ({phases_with_success})"""
    tasks = f"""SELECT phase, task, min(id) AS first, sum(solved) AS n_solved, count(solved) AS n,
        count(reported) AS n_reported FROM ({episodes}) AS found GROUP BY phase, task"""
    return f"""SELECT phase, CAST(sum(n_solved) AS bigint), CAST(sum(n) AS bigint), CAST(sum(n * n) AS bigint)
        FROM ({tasks}) AS tasks
        GROUP BY phase HAVING sum(n_reported) > 0 AND sum(n) > 0 ORDER BY min(first)"""


def outcome_means(on_failure: str) -> str:
    """A query for the mean of each named reward of outcomes. A failed episode without this reward counts with the
    reward of the setting `on_failure`, unless that is `exclude`.

    It has a row for each phase and name: phase, name, mean, and the number of episodes in the mean.
    """
    rewarded_episodes = "episodes JOIN rewards ON target = episodes.id"
    if on_failure == "exclude":
        return f"""SELECT phase, name, avg(value), count(*) FROM {rewarded_episodes} WHERE status = 'ok'
            GROUP BY phase, name ORDER BY phase, name"""
    # The mean is over the episodes with the reward and the failed episodes without it, which get this one instead: a
    # number, or the column `lowest`.
    reward_of_failure = _value(on_failure, "lowest")
    rewarded = f"""SELECT phase, name, sum(value) AS total, count(*) AS n_rewarded,
            count(*) FILTER (WHERE status = 'error') AS n_rewarded_failures,
            coalesce(min(value) FILTER (WHERE status = 'ok' AND value < 0), 0) AS lowest
        FROM {rewarded_episodes} WHERE {IS_OUTCOME} GROUP BY phase, name"""
    failures = f"SELECT phase, count(*) AS n_failures FROM episodes WHERE {_FAILED} GROUP BY phase"
    return f"""
        WITH rewarded AS ({rewarded}), failures AS ({failures})
        SELECT phase, name, (total + n_unrewarded * {reward_of_failure}) / (n_rewarded + n_unrewarded),
            n_rewarded + n_unrewarded
        FROM (SELECT rewarded.*, coalesce(n_failures, 0) - n_rewarded_failures AS n_unrewarded
              FROM rewarded LEFT JOIN failures ON failures.phase = rewarded.phase) AS found
        ORDER BY phase, name"""


LOWEST_SUM = """SELECT coalesce(min(total), 0) FROM (SELECT sum(value) AS total FROM episodes JOIN rewards
    ON target = episodes.id WHERE phase = ? AND status = 'ok' GROUP BY episodes.id) AS found WHERE total < 0"""
"""The lowest outcome of a phase, or 0."""


def outcome_sum(on_failure: str, lowest: float, reward_sum: str = REWARD_SUM) -> str:
    """An SQL expression: the sum of an episode's outcome; NULL if its outcome is unknown. `reward_sum` is the
    expression for the sum of its rewards."""
    failed = "NULL"
    if on_failure != "exclude":
        failed = f"coalesce({reward_sum}, {_value(on_failure, repr(lowest))})"
    return f"CASE WHEN status = 'ok' THEN {reward_sum} WHEN {_FAILED} THEN {failed} END"


def _value(on_failure: str, lowest: str) -> str:
    """An SQL expression: the reward of a failed episode. `lowest` is the expression for the lowest reward."""
    value = failure_reward(on_failure)
    return lowest if value == "lowest" else repr(value)
