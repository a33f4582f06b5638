"""95% intervals of means, and of differences over the same tasks, that hold for few tasks too.

A task is one observation, with the mean of its samples: samples of one task are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from cotune.intervals import LEVEL, Interval, share


def shown(found: Interval | None, form: str) -> str:
    """`41.2% [29.4%, 53.9%]` for the form `.1%`; `-` for None."""
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return format(found.mean, form)
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def mean(
    values: Sequence[float],
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
    *,
    least: float = -math.inf,
) -> Interval | None:
    """Mean with its Student's t interval of this level, unknown for a single value; None without values.

    Where the values have `bounds` the interval stays within them, and half an observation at each of both is added: few
    values that are all equal do not tell the mean exactly (Agresti and Min 2005, Statistics in Medicine 24, 729-740,
    who add a half to each cell of a table). `least` cuts the interval alone, as of seconds, which are never negative.
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
    return Interval(mean=centre, low=max(low, least), high=high, n=n)


def mean_reward(rewards: Sequence[float], bounds: tuple[float, float] | None = None) -> Interval | None:
    """Mean of rewards with an interval over tasks, inside the `bounds` of the reward if they are known.

    Rewards from 0 to 1 count as shares, unless their bounds are wider: Wilson's interval if all are 0 or 1, else `mean`
    with these bounds. For other rewards the interval holds that of `mean` without bounds and with those seen. Wide
    bounds are only used to cut it: half an observation at each end would tell more of the bounds than of the rewards.
    """
    if not rewards:
        return None
    if not within_unit(rewards if bounds is None else bounds):
        seen = min(0.0, *rewards), max(0.0, *rewards)
        found = _wider(mean(rewards), mean(rewards, seen))
    elif set(rewards) <= {0.0, 1.0}:
        found = share(sum(rewards), len(rewards))
    else:
        found = mean(rewards, (0.0, 1.0))
    return _inside(found, bounds)


def pass_at(k: int, tried: Sequence[tuple[int, int]]) -> Interval | None:
    """Mean over tasks of the chance that at least one of `k` of its episodes succeeds; None without tasks.

    `tried` has the episodes and the successes of each task: 1 - C(n - c, k) / C(n, k), unbiased for n of at least k
    (Chen et al. 2021, arXiv 2107.03374, equation 1). The interval is over tasks, within 0 and 1.
    """
    return mean([1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in tried], (0.0, 1.0))


def paired_difference(
    after: Mapping[str, float],
    before: Mapping[str, float],
    level: float = LEVEL,
    *,
    bounds: tuple[float, float] | None = None,
) -> Interval | None:
    """Mean over shared tasks of after - before, with an interval over tasks as `mean_reward` has it, for rewards with
    these `bounds`. None without shared tasks.

    A difference counts as shown if the interval leaves out 0. This is the test of every comparison, of success (1.0 or
    0.0, or the share of a task's samples) as of rewards. The interval includes 0 unless the sign-flip test rejects too,
    so equally good policies are told apart in at most 5% of comparisons, however few the tasks.
    """
    differences = shared_differences(after, before)
    shared = [side[task] for side in (after, before) for task in after.keys() & before.keys()]
    if within_unit(shared if bounds is None else bounds):
        found = mean(differences, (-1.0, 1.0), level)
    else:
        size = max([abs(x) for x in differences], default=0.0)
        found = _wider(mean(differences, level=level), mean(differences, (-size, size), level))
    if bounds is not None:
        found = _inside(found, (bounds[0] - bounds[1], bounds[1] - bounds[0]))
    if found is None or found.low is None or found.high is None or sign_flip_p(differences) <= 1 - level:
        return found
    return Interval(mean=found.mean, low=min(found.low, 0.0), high=max(found.high, 0.0), n=found.n)


def shared_differences(after: Mapping[str, float], before: Mapping[str, float]) -> list[float]:
    """after - before of each shared task, in the order of `after`."""
    return [float(after[task]) - float(before[task]) for task in after if task in before]


MOST_EXACT = 100
"""Unlike differences whose distribution under sign flips is computed exactly; it is close to normal beyond."""
STEPS = 840
"""Differences are rounded to this part of the largest one: exact for halves to eighths (it is divisible by 1 to 8)."""


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the sign-flip test: how often the sum would be as far from 0 as it is, if each difference had
    either sign with probability 1/2 (Fisher 1935, The Design of Experiments, section 21).

    For differences of 1, 0 and -1 this is McNemar's exact test.
    """
    sizes = np.abs([x for x in differences if x])
    if not len(sizes):
        return 1.0
    largest = float(sizes.max())
    if np.allclose(sizes, largest):
        gained = sum(x > 0 for x in differences)
        return float(stats.binomtest(gained, len(sizes)).pvalue)
    total = abs(sum(differences))
    if len(sizes) > MOST_EXACT:
        return float(2 * stats.norm.sf(total / math.sqrt(float((sizes**2).sum()))))
    # The distribution of the sum, in units of `largest / STEPS`, one difference after the other. Index 0 is the sum in
    # which all are negative: adding a positive one instead moves it by twice its size.
    units = np.rint(sizes / largest * STEPS).astype(int)
    chances = np.ones(1)
    for unit in units:
        both = np.zeros(len(chances) + 2 * unit)
        both[: len(chances)] += chances / 2
        both[2 * unit :] += chances / 2
        chances = both
    sums = np.arange(len(chances)) - units.sum()
    observed = abs(int(np.sum(np.rint(np.asarray(differences) / largest * STEPS))))
    return float(min(chances[np.abs(sums) >= observed].sum(), 1.0))


def within_unit(values: Iterable[float]) -> bool:
    return all(0.0 <= value <= 1.0 for value in values)


def _inside(found: Interval | None, bounds: tuple[float, float] | None) -> Interval | None:
    """The interval cut at these bounds. It still holds its mean, which rounding may put a little outside of them."""
    if found is None or found.low is None or found.high is None or bounds is None:
        return found
    low, high = max(found.low, bounds[0]), min(found.high, bounds[1])
    return Interval(mean=found.mean, low=min(low, found.mean), high=max(high, found.mean), n=found.n)


def _wider(one: Interval | None, other: Interval | None) -> Interval | None:
    if one is None or other is None or one.low is None or other.low is None or one.high is None or other.high is None:
        return one
    return Interval(mean=one.mean, low=min(one.low, other.low), high=max(one.high, other.high), n=one.n)
