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
TINY = 1e-300
"""Replaces a total weight of 0 under a mean, whose numerator is then 0 too."""


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
    count = weights.sum()
    mean = (weights * rewards).sum() / max(count, TINY)
    divisor = count - ddof if count > ddof else 1.0
    variance = (weights * (rewards - mean) ** 2).sum() / divisor
    scaled: Floats = above(rewards, mean) / (np.sqrt(variance) + EPS)
    return scaled


def leave_one_out(rewards: Floats) -> Floats:
    """r_i minus the mean of the other rewards; 0 if all are equal."""
    if all_equal(rewards):
        return np.zeros(len(rewards))
    return above(rewards, (rewards.sum() - rewards) / (len(rewards) - 1))


class Units(NamedTuple):
    """The rewards that the statistics of a group count, one for each of u units: samples or trajectories."""

    group: Codes
    """[u] the index of each unit's group."""
    reward: Floats
    """[u] the reward of a sample, or the mean reward of the samples of a trajectory."""
    weight: Floats
    """[u] how many times each reward counts: once, or once for each token of a sample."""


class Spread(NamedTuple):
    """Statistics of the rewards of g groups; each array is [g]."""

    size: Floats
    """Number of units in the group."""
    mean: Floats
    variance: Floats
    """The variance of the population."""
    flat: Bools
    """Whether all rewards of the group are equal, so that a comparison teaches nothing."""


def units(samples: Sequence[Sample], reward: Floats, group: Codes, unit: Unit) -> Units:
    """The rewards that the mean and variance of a group are taken over, with their weights.

    With "sample" they are the rewards of the samples, and with "token" too, but weighted by the number of tokens. With
    "trajectory" they are the mean rewards of the samples that each episode has in the group. `reward` and `group` have
    the reward of each sample and the index of its group, [n] each.
    """
    if unit == "sample":
        return Units(group=group, reward=reward, weight=np.ones(len(samples)))
    if unit == "token":
        tokens = np.array([sample.tokens for sample in samples], np.float64)
        return Units(group=group, reward=reward, weight=tokens)

    # An episode with samples in two groups is two units, one in each group.
    group_and_episode = [(int(group[i]), sample.rollout) for i, sample in enumerate(samples)]
    unit_of_sample, _ = codes(group_and_episode)  # [n] numbers from 0 to u - 1
    samples_of_unit = np.bincount(unit_of_sample)
    _, first_samples = np.unique(unit_of_sample, return_index=True)
    return Units(
        group=group[first_samples],
        reward=np.bincount(unit_of_sample, reward) / samples_of_unit,
        weight=np.ones(len(samples_of_unit)),
    )


def spread(units: Units, n_groups: int) -> Spread:
    """The size, mean and variance of the rewards in each of g = `n_groups` groups, and whether they are equal."""
    # All arrays but `group`, which has the group of each unit, [u], have an entry for each group, [g].
    group = units.group
    size = np.bincount(group, minlength=n_groups).astype(np.float64)
    total_weight: Floats = np.bincount(group, units.weight, minlength=n_groups).astype(np.float64)
    divisor = np.maximum(total_weight, TINY)
    mean = np.bincount(group, units.weight * units.reward, minlength=n_groups) / divisor
    squares = np.bincount(group, units.weight * (units.reward - mean[group]) ** 2, minlength=n_groups)

    maximum = np.full(n_groups, -np.inf)
    minimum = np.full(n_groups, np.inf)
    np.maximum.at(maximum, group, units.reward)
    np.minimum.at(minimum, group, units.reward)
    largest = np.maximum(np.abs(maximum), np.abs(minimum))
    flat = (size < 2) | (maximum - minimum <= FLAT * largest)
    return Spread(size=size, mean=mean, variance=squares / divisor, flat=flat)
