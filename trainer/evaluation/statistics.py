"""95% intervals of means, and of differences over the same tasks, that hold for few tasks too.

A task is one observation, with the mean of its samples: samples of one task are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from cotune.intervals import LEVEL, Interval, share


def shown(interval: Interval | None, form: str) -> str:
    """Format an interval: `41.2% [29.4%, 53.9%]` for the form `.1%`; `-` for None."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return format(interval.mean, form)
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def mean(
    values: Sequence[float],
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
    *,
    least: float = -math.inf,
) -> Interval | None:
    """Return the mean with its Student's t interval of this level. A single value has no interval; no values give None.

    With `bounds`, the interval stays within them, and half an observation is added at each bound. Otherwise a few equal
    values would seem to determine the mean exactly. Agresti and Min (2005, Statistics in Medicine 24, 729-740) add a
    half to each cell of a table in the same way. `least` only cuts the interval. It is for quantities that are never
    negative, for example seconds.
    """
    n = len(values)
    if n == 0:
        return None
    array = np.asarray(values, dtype=np.float64)
    centre = float(array.mean())
    if n == 1:
        return Interval(mean=centre, n=1)

    # The t interval of the values together with half an observation at each bound. `ends` are both bounds, or empty.
    ends = np.array(bounds or (), np.float64)
    observations = n + len(ends) / 2
    mean_of_all = float(array.sum() + ends.sum() / 2) / observations
    sum_of_squares = float(((array - mean_of_all) ** 2).sum() + ((ends - mean_of_all) ** 2).sum() / 2)
    degrees = observations - 1
    standard_error = math.sqrt(sum_of_squares / degrees / observations)
    half_width = float(stats.t.ppf(0.5 + level / 2, degrees)) * standard_error

    # The added observations may move the interval off the mean of the values, so it is widened to contain that mean.
    low = min(centre, mean_of_all - half_width)
    high = max(centre, mean_of_all + half_width)
    if bounds is not None:
        low = max(low, bounds[0])
        high = min(high, bounds[1])
    return Interval(mean=centre, low=max(low, least), high=high, n=n)


def mean_reward(rewards: Sequence[float], bounds: tuple[float, float] | None = None) -> Interval | None:
    """Return the mean of rewards with an interval over tasks, inside the `bounds` of the reward if they are known.

    Rewards from 0 to 1 are treated as shares, unless their bounds are wider. If all are 0 or 1, the interval is
    Wilson's, else it is the one of `mean` with the bounds 0 and 1. For other rewards, two intervals are joined: without
    bounds, and with the observed range (including 0) as bounds. Declared bounds wider than 0 to 1 only cut the
    interval, because half an observation at each end would describe the bounds more than the rewards.
    """
    if not rewards:
        return None
    if not within_unit(rewards if bounds is None else bounds):
        observed_range = min(0.0, *rewards), max(0.0, *rewards)
        interval = _wider(mean(rewards), mean(rewards, observed_range))
    elif set(rewards) <= {0.0, 1.0}:
        interval = share(sum(rewards), len(rewards))
    else:
        interval = mean(rewards, (0.0, 1.0))
    return _inside(interval, bounds)


def pass_at(k: int, counts: Sequence[tuple[int, int]]) -> Interval | None:
    """Return the mean over tasks of the chance that at least one of `k` episodes succeeds; None without tasks.

    `counts` has (n, c) for each task: its episodes and its successes. The chance is 1 - C(n - c, k) / C(n, k), unbiased
    for n of at least k (Chen et al. 2021, arXiv 2107.03374, equation 1). The interval is over tasks, within 0 and 1.
    """
    return mean([1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts], (0.0, 1.0))


def paired_difference(
    after: Mapping[str, float],
    before: Mapping[str, float],
    level: float = LEVEL,
    *,
    bounds: tuple[float, float] | None = None,
) -> Interval | None:
    """Return the mean over shared tasks of after - before, with an interval over tasks; None without shared tasks.

    `bounds` are the bounds of the rewards that are compared, and have the same effect as in `mean_reward`.

    A difference counts as shown if the interval does not contain 0. Every comparison uses this test, whether of success
    (1.0 or 0.0, or the share of a task's samples) or of rewards. The interval contains 0 unless the sign-flip test
    rejects too, so at most 5% of comparisons find a difference between equally good policies, however few the tasks.
    """
    differences = shared_differences(after, before)
    shared_tasks = after.keys() & before.keys()
    values = [after[task] for task in shared_tasks] + [before[task] for task in shared_tasks]
    if within_unit(values if bounds is None else bounds):
        interval = mean(differences, (-1.0, 1.0), level)
    else:
        largest = max([abs(difference) for difference in differences], default=0.0)
        interval = _wider(mean(differences, level=level), mean(differences, (-largest, largest), level))
    if bounds is not None:
        interval = _inside(interval, (bounds[0] - bounds[1], bounds[1] - bounds[0]))
    if interval is None or interval.low is None or interval.high is None:
        return interval
    if sign_flip_p(differences) <= 1 - level:
        return interval
    return Interval(mean=interval.mean, low=min(interval.low, 0.0), high=max(interval.high, 0.0), n=interval.n)


def shared_differences(after: Mapping[str, float], before: Mapping[str, float]) -> list[float]:
    """after - before of each shared task, in the order of `after`."""
    return [float(after[task]) - float(before[task]) for task in after if task in before]


MOST_EXACT = 100
"""Most differences of unequal size for which the distribution under sign flips is computed exactly. With more, it is
close to normal."""
STEPS = 840
"""Differences are rounded to 1 / STEPS of the largest one. Halves to eighths stay exact: 840 is divisible by 1 to 8."""


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of the sign-flip test (Fisher 1935, The Design of Experiments, section 21).

    This is the chance that the sum is at least as far from 0 as observed, if each difference has either sign with
    probability 1/2. For differences of 1, 0 and -1 this is McNemar's exact test.
    """
    # Differences of 0 do not change the sum.
    sizes = np.abs([difference for difference in differences if difference])
    if not len(sizes):
        return 1.0
    largest = float(sizes.max())

    # 1. Equal sizes: only the number of positive differences matters.
    if np.allclose(sizes, largest):
        gained = sum(difference > 0 for difference in differences)
        return float(stats.binomtest(gained, len(sizes)).pvalue)

    # 2. Many differences: the sum is about normal.
    total = abs(sum(differences))
    if len(sizes) > MOST_EXACT:
        return float(2 * stats.norm.sf(total / math.sqrt(float((sizes**2).sum()))))

    # 3. Otherwise build the distribution of the sum, in units of `largest / STEPS`, one difference after the other.
    # Index 0 of `chances` is the sum with all differences negative. With half of the chance, the next difference is
    # positive in place of negative, which moves the sum by twice its size.
    units = np.rint(sizes / largest * STEPS).astype(int)
    chances = np.ones(1)
    for size in units:
        with_difference = np.zeros(len(chances) + 2 * size)
        with_difference[: len(chances)] += chances / 2
        with_difference[2 * size :] += chances / 2
        chances = with_difference
    sums = np.arange(len(chances)) - units.sum()
    observed = abs(int(np.sum(np.rint(np.asarray(differences) / largest * STEPS))))
    return float(min(chances[np.abs(sums) >= observed].sum(), 1.0))


def within_unit(values: Iterable[float]) -> bool:
    return all(0.0 <= value <= 1.0 for value in values)


def _inside(interval: Interval | None, bounds: tuple[float, float] | None) -> Interval | None:
    """Cut an interval at these bounds. It still contains its mean, which rounding may put slightly outside of them."""
    if interval is None or interval.low is None or interval.high is None or bounds is None:
        return interval
    low = max(interval.low, bounds[0])
    high = min(interval.high, bounds[1])
    return Interval(mean=interval.mean, low=min(low, interval.mean), high=max(high, interval.mean), n=interval.n)


def _wider(first: Interval | None, second: Interval | None) -> Interval | None:
    """Return the interval that contains both; the first one if either is missing or has no ends."""
    if first is None or first.low is None or first.high is None:
        return first
    if second is None or second.low is None or second.high is None:
        return first
    return Interval(mean=first.mean, low=min(first.low, second.low), high=max(first.high, second.high), n=first.n)
