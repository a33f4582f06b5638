"""Means of recorded outcomes in SQL, which count failed episodes as `on_failure` says (`OnFailure`)."""

from __future__ import annotations

IS_OUTCOME = """(status = 'ok' OR status = 'error' AND CASE WHEN json_valid(body)
    THEN coalesce(json_extract(body, '$.blame'), 'policy') = 'policy' ELSE 0 END)"""
"""Whether an episode says something of its policies: not one that the infrastructure has failed."""
_FAILED = f"status = 'error' AND {IS_OUTCOME}"


def outcome_means(on_failure: str) -> str:
    """A query for `phase`, `name`, mean and number of episodes, of each component of outcomes."""
    ended = "episodes JOIN rewards ON target = episodes.id"
    means = f"SELECT phase, name, avg(value), count(*) FROM {ended} WHERE status = 'ok' GROUP BY phase, name"
    if on_failure == "exclude":
        return f"{means} ORDER BY phase, name"
    return f"""
        WITH good AS (SELECT phase, name, sum(value) AS total, count(*) AS n, min(0, min(value)) AS low
                      FROM {ended} WHERE status = 'ok' GROUP BY phase, name),
             bad AS (SELECT phase, count(*) AS n FROM episodes WHERE {_FAILED} GROUP BY phase)
        SELECT phase, name, (total + m * {_value(on_failure, "low")}) / (n + m), n + m
        FROM (SELECT good.*, coalesce(bad.n, 0) AS m FROM good LEFT JOIN bad ON bad.phase = good.phase)
        ORDER BY phase, name"""


LOWEST_SUM = """SELECT min(0, coalesce(min(total), 0)) FROM (SELECT sum(value) AS total FROM episodes JOIN rewards
    ON target = episodes.id WHERE phase = ? AND status = 'ok' GROUP BY episodes.id)"""
"""The lowest outcome of a phase, or 0."""


def outcome_sum(on_failure: str, lowest: float) -> str:
    """An expression for the sum of an episode's outcome; NULL for one that nobody knows."""
    failed = "NULL" if on_failure == "exclude" else _value(on_failure, repr(lowest))
    own = "(SELECT sum(value) FROM rewards WHERE target = episodes.id)"
    return f"CASE WHEN status = 'ok' THEN {own} WHEN {_FAILED} THEN {failed} END"


def _value(on_failure: str, lowest: str) -> str:
    kind, _, number = on_failure.partition(":")
    return lowest if kind == "lowest" else repr(float(number))
