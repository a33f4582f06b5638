"""95% intervals: Student's t for means, and for differences over the same tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from scipy import stats

from cotune.intervals import LEVEL, Interval, wilson


def mean(values: Sequence[float]) -> Interval | None:
    """Mean with its Student's t interval, unknown for a single value; None without values."""
    n = len(values)
    if n == 0:
        return None
    array = np.asarray(values, dtype=np.float64)
    centre = float(array.mean())
    if n == 1:
        return Interval(mean=centre, n=1)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1) * array.std(ddof=1) / np.sqrt(n))
    return Interval(mean=centre, low=centre - half, high=centre + half, n=n)


def pass_at(k: int, tried: Sequence[tuple[int, int]]) -> Interval | None:
    """Mean over tasks of the chance that at least one of `k` of its episodes succeeds; None without tasks.

    `tried` has the episodes and the successes of each task: 1 - C(n - c, k) / C(n, k), unbiased for n of at least k
    (Chen et al. 2021, arXiv 2107.03374, equation 1). The interval is Student's over tasks, within 0 and 1.
    """
    found = mean([1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in tried])
    if found is None or found.low is None or found.high is None:
        return found
    return msgspec.structs.replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))


def paired_difference(after: Mapping[str, float], before: Mapping[str, float]) -> Interval | None:
    """Mean over shared tasks of after - before, with the paired t interval; None without shared tasks."""
    return mean([after[task] - before[task] for task in after if task in before])


def paired_shares(after: Mapping[str, bool], before: Mapping[str, bool]) -> Interval | None:
    """Difference of two success shares over shared tasks, with Newcombe's hybrid interval for paired data.

    Wilson bounds of both shares, joined by their correlation (Newcombe 1998, Statistics in Medicine 17, 2635-2650,
    method 10); unlike the t interval it keeps a width when every task agrees. None without shared tasks.
    """
    tasks = [task for task in after if task in before]
    n = len(tasks)
    if n == 0:
        return None
    both = sum(after[t] and before[t] for t in tasks)
    gained = sum(after[t] and not before[t] for t in tasks)
    lost = sum(before[t] and not after[t] for t in tasks)
    difference, low, high = _newcombe(both, gained, lost, n - both - gained - lost)
    return Interval(mean=difference, low=low, high=high, n=n)


def _newcombe(both: int, gained: int, lost: int, neither: int) -> tuple[float, float, float]:
    n = both + gained + lost + neither
    p1, p2 = (both + gained) / n, (both + lost) / n
    (low1, high1), (low2, high2) = wilson(p1, n), wilson(p2, n)
    product = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    cross = float(both * neither - gained * lost)
    if cross > 0:
        cross = max(cross - n / 2, 0.0)
    phi = cross / math.sqrt(product) if product else 0.0

    def spread(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p1 - p2, p1 - p2 - spread(p1 - low1, high2 - p2), p1 - p2 + spread(high1 - p1, p2 - low2)
