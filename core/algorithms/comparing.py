"""Compare rewards: the building blocks of advantages, and the statistics of groups for figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from cotune.algorithms.samples import Bools, Codes, Floats, Sample, codes

Unit = Literal["sample", "trajectory", "token"]

FLAT = 1e-12
"""Rewards whose range is within this share of their size count as equal, and so do a reward and its baseline: rounding
of float sums stays below it."""
EPS = 1e-6
"""Added to a standard deviation before it divides."""


def all_equal(rewards: Floats) -> bool:
    """Whether rewards are equal, so that a comparison teaches nothing. True for a single reward."""
    if len(rewards) < 2:
        return True
    low, high = float(rewards.min()), float(rewards.max())
    return high - low <= FLAT * max(abs(low), abs(high))


def above(rewards: Floats, baseline: Floats | float) -> Floats:
    """The difference of each reward from its baseline; 0 if the difference is only rounding."""
    difference = np.asarray(rewards - baseline, np.float64)
    largest = np.abs(rewards).max(initial=0.0)
    difference[np.abs(difference) <= FLAT * largest] = 0.0
    return difference


def centred(rewards: Floats) -> Floats:
    """r - mean(r); 0 if all rewards are equal."""
    return np.zeros(len(rewards)) if all_equal(rewards) else above(rewards, float(rewards.mean()))


def standardized(rewards: Floats, *, ddof: int, weights: Floats | None = None) -> Floats:
    """(r - mean(r)) / (std(r) + 1e-6); 0 if all rewards are equal.

    `ddof` is subtracted from the number of rewards under the variance: 0 for the population's, 1 for the sample's.
    `weights` say how many times each reward counts, for example the number of tokens of its answer.
    """
    if all_equal(rewards):
        return np.zeros(len(rewards))
    if weights is None:
        weights = np.ones(len(rewards))
    total = weights.sum()
    mean = (weights * rewards).sum() / max(total, 1e-300)
    variance = (weights * (rewards - mean) ** 2).sum() / (total - ddof if total > ddof else 1.0)
    scaled: Floats = above(rewards, mean) / (np.sqrt(variance) + EPS)
    return scaled


def leave_one_out(rewards: Floats) -> Floats:
    """r_i minus the mean of the other rewards; 0 if all are equal."""
    if all_equal(rewards):
        return np.zeros(len(rewards))
    return above(rewards, (rewards.sum() - rewards) / (len(rewards) - 1))


class Units(NamedTuple):
    """The units of the statistics of a group: each sample, each trajectory (with the mean reward of its samples), or
    each sample weighted by its number of tokens. There are n samples, u units and g groups."""

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


def units(samples: Sequence[Sample], reward: Floats, group: Codes, unit: Unit) -> Units:
    """The units whose rewards are averaged within a group: trajectories, tokens, or samples.

    `reward`, [n], and the numbers of the groups, `group`, belong to `samples`. The unit of a trajectory has the mean
    reward of its samples. With "token", a sample counts once for each of its tokens.
    """
    if unit == "trajectory":
        of_sample, _ = codes(list(zip(group.tolist(), (s.rollout for s in samples), strict=True)))
        size = np.bincount(of_sample)
        # A unit is a trajectory within one group, so its first sample has the number of its group.
        first = np.unique(of_sample, return_index=True)[1]
        return Units(of_sample, group[first], np.bincount(of_sample, reward) / size, np.ones(len(size)))
    weight = np.array([s.tokens for s in samples], np.float64) if unit == "token" else np.ones(len(samples))
    return Units(np.arange(len(samples)), group, reward, weight)


def spread(units: Units, count: int, ddof: int = 0) -> Spread:
    """Statistics of the rewards of `units` for each of `count` groups."""
    _, group, reward, weight = units
    size = np.bincount(group, minlength=count).astype(np.float64)
    total: Floats = np.bincount(group, weight, minlength=count).astype(np.float64)
    mean = np.bincount(group, weight * reward, minlength=count) / np.maximum(total, 1e-300)
    squares = np.bincount(group, weight * (reward - mean[group]) ** 2, minlength=count)
    # Where `total` is too small, the group has at most one unit, and its squares are 0 with any divisor.
    variance = squares / np.where(total > ddof, total - ddof, 1.0)
    high = np.full(count, -np.inf)
    low = np.full(count, np.inf)
    np.maximum.at(high, group, reward)
    np.minimum.at(low, group, reward)
    largest = np.maximum(np.abs(high), np.abs(low))
    flat = (size < 2) | (high - low <= FLAT * largest)
    return Spread(size, total, mean, variance, high, flat)
