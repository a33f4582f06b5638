"""95% intervals of means, and of differences over the same tasks, that hold for few tasks too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from cotune.intervals import LEVEL, Interval, share, wilson


def shown(found: Interval | None, form: str) -> str:
    """`41.2% [29.4%, 53.9%]` for the form `.1%`; `-` for None."""
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return format(found.mean, form)
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def mean(values: Sequence[float], bounds: tuple[float, float] | None = None, level: float = LEVEL) -> Interval | None:
    """Mean with its Student's t interval of this level, unknown for a single value; None without values.

    Where the values have `bounds` the interval stays within them, and half an observation at each of both is added: few
    values that are all equal do not tell the mean exactly (Agresti and Min 2005, Statistics in Medicine 24, 729-740,
    who add a half to each cell of a table).
    """
    n = len(values)
    if n == 0:
        return None
    array = np.asarray(values, dtype=np.float64)
    centre = float(array.mean())
    if n == 1:
        return Interval(mean=centre, n=1)
    ends = np.array(bounds or (), np.float64)
    total = n + len(ends) / 2
    middle = float(array.sum() + ends.sum() / 2) / total
    spread = float(((array - middle) ** 2).sum() + ((ends - middle) ** 2).sum() / 2)
    half = float(stats.t.ppf(0.5 + level / 2, total - 1)) * math.sqrt(spread / (total - 1) / total)
    low, high = min(centre, middle - half), max(centre, middle + half)
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(mean=centre, low=low, high=high, n=n)


def mean_reward(rewards: Sequence[float]) -> Interval | None:
    """Mean of rewards: Wilson's interval where all are 0 or 1, else as `mean`, with bounds where all are within 0 and
    1. Of other rewards no bounds are known: the interval holds those without any and with those that were seen."""
    if set(rewards) <= {0.0, 1.0}:
        return share(sum(rewards), len(rewards))
    if _unit(rewards):
        return mean(rewards, (0.0, 1.0))
    return _wider(mean(rewards), mean(rewards, (min(0.0, *rewards), max(0.0, *rewards))))


def pass_at(k: int, tried: Sequence[tuple[int, int]]) -> Interval | None:
    """Mean over tasks of the chance that at least one of `k` of its episodes succeeds; None without tasks.

    `tried` has the episodes and the successes of each task: 1 - C(n - c, k) / C(n, k), unbiased for n of at least k
    (Chen et al. 2021, arXiv 2107.03374, equation 1). The interval is over tasks, within 0 and 1.
    """
    return mean([1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in tried], (0.0, 1.0))


def paired_difference(after: Mapping[str, float], before: Mapping[str, float], level: float = LEVEL) -> Interval | None:
    """Mean over shared tasks of after - before, with an interval over tasks as `mean_reward` has it; that of
    `paired_shares` where all rewards are 0 or 1. None without shared tasks."""
    tasks = [task for task in after if task in before]
    rewards = [side[task] for side in (after, before) for task in tasks]
    if len(tasks) > 1 and set(rewards) <= {0.0, 1.0}:
        return paired_shares({t: after[t] == 1.0 for t in tasks}, {t: before[t] == 1.0 for t in tasks}, level)
    found = [after[task] - before[task] for task in tasks]
    if _unit(rewards):
        return mean(found, (-1.0, 1.0), level)
    size = max([abs(x) for x in found], default=0.0)
    return _wider(mean(found, level=level), mean(found, (-size, size), level))


def paired_shares(after: Mapping[str, bool], before: Mapping[str, bool], level: float = LEVEL) -> Interval | None:
    """Difference of two success shares over shared tasks, with Newcombe's hybrid interval for paired data.

    Wilson bounds of both shares, joined by their correlation (Newcombe 1998, Statistics in Medicine 17, 2635-2650,
    method 10); unlike the t interval it keeps a width when every task agrees. It is widened up to 0 where McNemar's
    exact test shows no difference, as for few tasks it is too narrow. None without shared tasks.
    """
    tasks = [task for task in after if task in before]
    n = len(tasks)
    if n == 0:
        return None
    both = sum(after[t] and before[t] for t in tasks)
    gained = sum(after[t] and not before[t] for t in tasks)
    lost = sum(before[t] and not after[t] for t in tasks)
    difference, low, high = _newcombe(both, gained, lost, n - both - gained - lost, _z(level))
    if gained == lost or stats.binomtest(gained, gained + lost).pvalue > 1 - level:
        low, high = min(low, 0.0), max(high, 0.0)
    return Interval(mean=difference, low=low, high=high, n=n)


def _unit(values: Sequence[float]) -> bool:
    return all(0.0 <= value <= 1.0 for value in values)


def _wider(one: Interval | None, other: Interval | None) -> Interval | None:
    if one is None or other is None or one.low is None or other.low is None or one.high is None or other.high is None:
        return one
    return Interval(mean=one.mean, low=min(one.low, other.low), high=max(one.high, other.high), n=one.n)


def _z(level: float) -> float:
    return float(stats.norm.ppf(0.5 + level / 2))


def _newcombe(both: int, gained: int, lost: int, neither: int, z: float) -> tuple[float, float, float]:
    n = both + gained + lost + neither
    p1, p2 = (both + gained) / n, (both + lost) / n
    (low1, high1), (low2, high2) = wilson(p1, n, z), wilson(p2, n, z)
    product = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    cross = float(both * neither - gained * lost)
    if cross > 0:
        cross = max(cross - n / 2, 0.0)
    phi = cross / math.sqrt(product) if product else 0.0

    def spread(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p1 - p2, p1 - p2 - spread(p1 - low1, high2 - p2), p1 - p2 + spread(high1 - p1, p2 - low2)
