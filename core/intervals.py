"""Estimates with their 95% intervals, computed without a statistics package."""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec

LEVEL = 0.95
Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
"""Two-sided quantile of the normal distribution."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate with its 95% interval. `low` and `high` are None if `n` is too small for an interval; `n` is 0 if
    unknown."""

    mean: float
    low: float | None = None
    high: float | None = None
    n: int = 0


def share(successes: float, n: int) -> Interval | None:
    """Share of successes with its Wilson score interval; None without observations."""
    if n == 0:
        return None
    low, high = wilson(successes / n, n)
    return Interval(mean=successes / n, low=low, high=high, n=n)


def share_over_tasks(successes: float, n: int, squares: int) -> Interval | None:
    """Share of successful episodes, with Wilson's interval for as many observations as there are tasks; None without
    episodes.

    Episodes of one task are not independent, so each task counts once. `squares` is the sum over tasks of the squared
    number of their episodes: n^2 / squares is the number of tasks if all have as many episodes, and less if some have
    more than others (Kish 1965, Survey Sampling, section 11.7). The interval is at most too wide: it is exact if all
    episodes of a task end alike.
    """
    if n == 0:
        return None
    low, high = wilson(successes / n, n**2 / squares)
    return Interval(mean=successes / n, low=low, high=high, n=n)


def student_quantile(freedom: int, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's t with `freedom` degrees of freedom.

    The distribution has a closed form for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4),
    which is inverted by bisection.
    """

    def central_probability(t: float) -> float:
        """The probability of a value between -t and t."""
        angle = math.atan(t / math.sqrt(freedom))
        cosine = math.cos(angle)
        sine = math.sin(angle)
        odd = freedom % 2 == 1
        # The terms cos, 2/3 cos^3, 2*4/(3*5) cos^5, ... if odd; 1, 1/2 cos^2, 1*3/(2*4) cos^4, ... if even.
        term, total = (cosine, 0.0) if odd else (1.0, 0.0)
        for power in range(1 if odd else 0, freedom - 1, 2):
            total += term
            term *= cosine**2 * (power + 1) / (power + 2)
        if odd:
            return 2 / math.pi * (angle + sine * total)
        return sine * total

    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        if central_probability(middle) < level:
            low = middle
        else:
            high = middle
    return high


def wilson(p: float, n: float, z: float = Z) -> tuple[float, float]:
    """Bounds of a share `p` of `n` trials (Wilson 1927, JASA 22, 209-212)."""
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)
