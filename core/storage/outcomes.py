"""The outcomes of recorded episodes, in SQL, the same for all readers: success, and means and sums of their rewards.

A failed episode is no success. It counts its own rewards, or, if it has none, those of `on_failure` (`OnFailure`).
"""

from __future__ import annotations

import contextlib
import math
from typing import Literal, cast

OnFailure = float | Literal["lowest", "exclude"]
"""The reward of a failed episode."""

IS_OUTCOME = "(status = 'ok' OR status = 'error' AND coalesce(blame, 'policy') = 'policy')"
"""Whether an episode says something of its policies: not one that the infrastructure has failed."""
_FAILED = f"status = 'error' AND {IS_OUTCOME}"
_OWN = "(SELECT sum(value) FROM rewards WHERE target = episodes.id)"
ALL_OWN = """LEFT JOIN
    (SELECT target, sum(value) AS own FROM rewards WHERE instr(target, '.') = 0 GROUP BY target) AS given
    ON given.target = episodes.id"""
"""What gives each of all episodes the sum of its rewards, `own`, at once: one by one takes longer."""

_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}

REPORTED = """CASE WHEN status = 'ok' THEN CASE WHEN success >= 0.5 THEN 1 WHEN success IS NOT NULL THEN 0 END
    WHEN success IS NOT NULL THEN 0 END"""
"""Whether an episode solved its task as it reports itself (`Episode.solved`); NULL for one that reports no success."""


def solved(own: str = _OWN) -> str:
    """An expression for whether an episode counts as solved among others that report `success`: one that failed, or
    reports none, does not. NULL for one that says nothing of its policies, or reports neither success nor a reward:
    nobody knows its outcome. `own` is the expression for the sum of its rewards."""
    return f"""CASE WHEN {IS_OUTCOME} THEN CASE WHEN status != 'ok' THEN 0
        ELSE coalesce({REPORTED}, CASE WHEN {own} IS NOT NULL THEN 0 END) END END"""


def failure_reward(on_failure: str) -> OnFailure:
    """`on_failure` as a value: `lowest`, `exclude`, or the number of `reward:<number>`. Raises ValueError."""
    if on_failure in ("lowest", "exclude"):
        return cast(OnFailure, on_failure)
    kind, _, number = on_failure.partition(":")
    with contextlib.suppress(ValueError):
        if kind == "reward" and math.isfinite(float(number)):
            return float(number)
    raise ValueError(f"on_failure = {on_failure!r} is neither lowest, exclude nor reward:<number>")


def metric(value: object) -> float | None:
    """A reported metric as a number: a bool is 1 or 0, and so are the words true, yes, false and no. None for any other
    value, which reports nothing."""
    if isinstance(value, str):
        return _WORDS.get(value.lower())
    return float(value) if isinstance(value, int | float) else None


def success_counts(where: str = "true") -> str:
    """A query for the phase, its solved episodes, those that count, and the sum over tasks of the square of their
    number, for each phase in which an episode reports `success`. `where` chooses episodes."""
    return f"""SELECT phase, CAST(sum(good) AS bigint), CAST(sum(n) AS bigint), CAST(sum(n * n) AS bigint) FROM (
            SELECT phase, task, min(id) AS first, sum(solved) AS good, count(solved) AS n, count(reported) AS reports
            FROM (SELECT id, phase, task, {solved()} AS solved, {REPORTED} AS reported FROM episodes
                WHERE {where} AND phase IN (SELECT DISTINCT phase FROM episodes WHERE success IS NOT NULL)) AS found
            GROUP BY phase, task) AS tasks
        GROUP BY phase HAVING sum(reports) > 0 AND sum(n) > 0 ORDER BY min(first)"""


def outcome_means(on_failure: str) -> str:
    """A query for `phase`, `name`, mean and number of episodes, of each component of outcomes."""
    ended = "episodes JOIN rewards ON target = episodes.id"
    if on_failure == "exclude":
        means = f"SELECT phase, name, avg(value), count(*) FROM {ended} WHERE status = 'ok' GROUP BY phase, name"
        return f"{means} ORDER BY phase, name"
    return f"""
        WITH own AS (SELECT phase, name, sum(value) AS total, count(*) AS n,
                            count(*) FILTER (WHERE status = 'error') AS failed,
                            coalesce(min(value) FILTER (WHERE status = 'ok' AND value < 0), 0) AS low
                     FROM {ended} WHERE {IS_OUTCOME} GROUP BY phase, name),
             bad AS (SELECT phase, count(*) AS n FROM episodes WHERE {_FAILED} GROUP BY phase)
        SELECT phase, name, (total + m * {_value(on_failure, "low")}) / (n + m), n + m
        FROM (SELECT own.*, coalesce(bad.n, 0) - failed AS m FROM own LEFT JOIN bad ON bad.phase = own.phase) AS found
        ORDER BY phase, name"""


LOWEST_SUM = """SELECT coalesce(min(total), 0) FROM (SELECT sum(value) AS total FROM episodes JOIN rewards
    ON target = episodes.id WHERE phase = ? AND status = 'ok' GROUP BY episodes.id) AS found WHERE total < 0"""
"""The lowest outcome of a phase, or 0."""


def outcome_sum(on_failure: str, lowest: float, own: str = _OWN) -> str:
    """An expression for the sum of an episode's outcome; NULL for one that nobody knows. `own` is the expression for
    the sum of its rewards."""
    failed = "NULL" if on_failure == "exclude" else f"coalesce({own}, {_value(on_failure, repr(lowest))})"
    return f"CASE WHEN status = 'ok' THEN {own} WHEN {_FAILED} THEN {failed} END"


def _value(on_failure: str, lowest: str) -> str:
    value = failure_reward(on_failure)
    return lowest if value == "lowest" else repr(value)
