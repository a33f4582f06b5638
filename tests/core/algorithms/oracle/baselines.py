"""Baselines: what the reward of a sample is compared with. To add one, write its function and enter it in `BASELINES`.

Arrays have these sizes: n samples, u units (what counts once in the statistics), g groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from cotune.algorithms.samples import Bools, Codes, Floats, Sample, codes

Baseline = Literal["none", "mean", "leave_one_out", "max", "ema"]
Unit = Literal["sample", "trajectory", "token"]

COMPARING: tuple[Baseline, ...] = ("mean", "leave_one_out", "max")
"""Baselines made of the other members of a group, so that one sample alone has no advantage."""
FLAT = 1e-12
"""Rewards whose range is within this share of their size count as equal, and so do a reward and its baseline: sums of
floats differ by less."""


class Units(NamedTuple):
    """What counts once in a term's statistics.

    A trajectory's reward is the mean of its samples; a sample counted by its tokens weighs as many.
    """

    of_sample: Codes
    """[n] the unit of each sample."""
    group: Codes
    """[u] its group."""
    reward: Floats
    """[u]"""
    weight: Floats
    """[u]"""


class Spread(NamedTuple):
    """Statistics of groups, [g] each: number of units, their weight, mean, variance, maximum, and flatness."""

    size: Floats
    weight: Floats
    mean: Floats
    variance: Floats
    maximum: Floats
    flat: Bools


class Compared(NamedTuple):
    """What a baseline is made of. `average` [g] are the moving averages after this step, for `ema` alone."""

    group: Codes
    """[n] the group of each sample."""
    units: Units
    stats: Spread
    average: Floats


def units(samples: Sequence[Sample], reward: Floats, group: Codes, unit: Unit) -> Units:
    """The units of samples with `reward` [n] and numbers of their `group` [n]."""
    if unit == "trajectory":
        of_sample, _ = codes(list(zip(group.tolist(), (s.rollout for s in samples), strict=True)))
        size = np.bincount(of_sample)
        first = np.unique(of_sample, return_index=True)[1]
        return Units(of_sample, group[first], np.bincount(of_sample, reward) / size, np.ones(len(size)))
    weight = np.array([s.tokens for s in samples], np.float64) if unit == "token" else np.ones(len(samples))
    return Units(np.arange(len(samples)), group, reward, weight)


def spread(units: Units, count: int, ddof: int = 0) -> Spread:
    """Statistics of the rewards of `units` by group, of which there are `count`."""
    _, group, reward, weight = units
    size = np.bincount(group, minlength=count).astype(np.float64)
    total: Floats = np.bincount(group, weight, minlength=count).astype(np.float64)
    mean = np.bincount(group, weight * reward, minlength=count) / np.maximum(total, 1e-300)
    squares = np.bincount(group, weight * (reward - mean[group]) ** 2, minlength=count)
    variance = squares / np.where(total > ddof, total - ddof, 1.0)
    high = np.full(count, -np.inf)
    low = np.full(count, np.inf)
    np.maximum.at(high, group, reward)
    np.minimum.at(low, group, reward)
    largest = np.maximum(np.abs(high), np.abs(low))
    flat = (size < 2) | (high - low <= FLAT * largest)
    return Spread(size, total, mean, variance, high, flat)


def _leave_one_out(compared: Compared) -> Floats:
    """Mean over the other units of the group."""
    of_sample, group, reward, weight = compared.units
    stats = compared.stats
    others = stats.weight[group] - weight
    rest = (stats.weight * stats.mean)[group] - weight * reward
    return np.asarray((rest / np.where(others > 0, others, 1.0))[of_sample])


BASELINES: Mapping[Baseline, Callable[[Compared], Floats]] = {
    "none": lambda compared: np.zeros(len(compared.group)),
    "mean": lambda compared: compared.stats.mean[compared.group],
    "max": lambda compared: compared.stats.maximum[compared.group],
    "leave_one_out": _leave_one_out,
    "ema": lambda compared: compared.average[compared.group],
}
"""By name: [n] what is subtracted from the reward of each sample."""
