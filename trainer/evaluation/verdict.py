"""The verdict of a comparison in one sentence: a difference with its interval, or how many tasks would show one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from scipy import stats

from cotune.intervals import LEVEL, Interval
from cotune.tables import plural

POWER = 0.8
"""Chance that so many tasks show the difference."""
LEAST = 6
"""Tasks that an exact test needs at least: five that all differ the same way do so by chance in 1 of 16 comparisons."""
POINTS = 0.05
"""Difference of success shares for which the number of tasks is given."""


def tasks_for_share(after: Mapping[str, bool], before: Mapping[str, bool]) -> int:
    """Tasks whose paired shares show a difference of `POINTS` with 80% power at the 95% level.

    Connor 1987, Biometrics 43, 207. The share of tasks that only one of both solves is taken from those that both ran,
    at least `POINTS`.
    """
    shared = [task for task in after if task in before]
    unlike = max(sum(after[t] != before[t] for t in shared) / max(len(shared), 1), POINTS)
    spread = _z(0.5 + LEVEL / 2) * math.sqrt(unlike) + _z(POWER) * math.sqrt(unlike - POINTS**2)
    return math.ceil((spread / POINTS) ** 2)


def tasks_for_mean(deviation: float, difference: float) -> int:
    """Tasks whose paired differences, of this standard deviation, show a mean `difference` with 80% power."""
    return math.ceil(((_z(0.5 + LEVEL / 2) + _z(POWER)) * deviation / difference) ** 2)


def verdict_on_success(label: str, against: str, found: Interval, enough: int) -> str:
    """The sentence on a difference of success shares; `enough` tasks would show 5 points."""
    said = f"{100 * found.mean:+.1f} points of success, {_interval(found, 100, '.1f')}"
    clear = _clear(label, against, found, f"{abs(100 * found.mean):.1f} points of success", 100, ".1f")
    return clear or (
        f"no difference shown between {label} and {against}: {said}; about {_rounded(enough)} tasks would show "
        f"{100 * POINTS:.0f} points"
    )


def verdict_on_reward(label: str, against: str, found: Interval) -> str:
    """The sentence on a difference of rewards."""
    if found.low is None or found.high is None:
        return f"one task shows nothing of {label} against {against} ({found.mean:+.3f} of reward)"
    clear = _clear(label, against, found, f"{abs(found.mean):.3f} of reward", 1, ".3f")
    if clear:
        return clear
    said = f"no difference shown between {label} and {against}: {found.mean:+.3f} of reward, "
    said += _interval(found, 1, ".3f")
    half = (found.high - found.low) / 2
    deviation = half * math.sqrt(found.n) / float(stats.t.ppf(0.5 + LEVEL / 2, found.n - 1))
    if not found.mean or not deviation:
        return said
    enough = max(tasks_for_mean(deviation, found.mean), LEAST, found.n + 1)
    return f"{said}; about {_rounded(enough)} tasks would show a difference of this size"


def _clear(label: str, against: str, found: Interval, size: str, scale: float, form: str) -> str:
    """The sentence on an interval without zero, with the smaller end first; empty for another."""
    if found.low is None or found.high is None or found.low <= 0 <= found.high:
        return ""
    word, low, high = ("better", found.low, found.high) if found.mean > 0 else ("worse", -found.high, -found.low)
    bounds = f"95% interval {scale * low:{form}} to {scale * high:{form}}"
    return f"{label} is {word} than {against} by {size}, {bounds}, on {plural(found.n, 'task')}"


def _interval(found: Interval, scale: float, form: str) -> str:
    if found.low is None or found.high is None:
        return plural(found.n, "task")
    return f"95% interval {scale * found.low:{form}} to {scale * found.high:{form}}, on {plural(found.n, 'task')}"


def _rounded(number: int) -> str:
    """To two digits that count, upwards."""
    step = 10 ** max(len(str(number)) - 2, 0)
    return f"{math.ceil(number / step) * step:,}"


def _z(quantile: float) -> float:
    return float(stats.norm.ppf(quantile))
