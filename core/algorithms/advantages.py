"""Advantages: how much better than its peers each sample did. Pure functions over arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.attribution import Bools, Codes, Floats, attribute, codes, keys
from cotune.algorithms.own import own_advantages
from cotune.algorithms.recipes import Term
from cotune.algorithms.samples import Sample
from cotune.errors import GroupError

FLAT = 1e-12
"""Rewards whose range is within this share of their size count as equal, and so do a reward and its baseline: sums of
floats differ by less."""


class AdvantageState(msgspec.Struct, frozen=True):
    """What advantages remember from step to step: the moving averages, by term and group key."""

    ema: Mapping[str, float] = {}


def advantages(
    samples: Sequence[Sample], terms: Sequence[Term], state: AdvantageState | None = None
) -> tuple[Floats, AdvantageState]:
    """Weighted sum of the terms' advantages, [n] aligned with `samples`, and the state for the next step.

    Raises GroupError when a sample lacks a reward that a term needs; `prepare` leaves such samples out.
    """
    returns = [attribute(samples, term.attribution, term.key) for term in terms]
    if any(np.isnan(r).any() for r in returns):
        raise GroupError("A sample lacks a reward component that the recipe needs.", "Leave it out before.")
    return combine(samples, returns, terms, state or AdvantageState())


def combine(
    samples: Sequence[Sample], returns: Sequence[Floats], terms: Sequence[Term], state: AdvantageState
) -> tuple[Floats, AdvantageState]:
    """Like `advantages`, with the attributed rewards of each term given ([n] per term)."""
    total = np.zeros(len(samples))
    for slot, (term, reward) in enumerate(zip(terms, returns, strict=True)):
        if len(samples):
            advantage, state = _advantage(samples, reward, term, slot, state)
            total += term.weight * advantage
    return total, state


class Spread(msgspec.Struct, frozen=True):
    """Statistics of groups, one entry per group: number of units, their mean, variance, maximum, and flatness."""

    size: Floats
    weight: Floats
    mean: Floats
    variance: Floats
    maximum: Floats
    flat: Bools


def spread(reward: Floats, group: Codes, weight: Floats, count: int, ddof: int = 0) -> Spread:
    """Statistics of `reward` ([n]) by `group` ([n], numbers under `count`), weighted by `weight` ([n])."""
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


def units(samples: Sequence[Sample], reward: Floats, group: Codes, term: Term) -> tuple[Codes, Codes, Floats, Floats]:
    """What counts once in a term's statistics: ([n] unit of each sample, and per unit: group, reward, weight).

    A trajectory's reward is the mean of its samples; a sample counted by its tokens weighs as many.
    """
    if term.unit == "trajectory":
        unit, _ = codes(list(zip(group.tolist(), (s.rollout for s in samples), strict=True)))
        size = np.bincount(unit)
        first = np.unique(unit, return_index=True)[1]
        return unit, group[first], np.bincount(unit, reward) / size, np.ones(len(size))
    weight = np.array([s.tokens for s in samples], np.float64) if term.unit == "token" else np.ones(len(samples))
    return np.arange(len(samples)), group, reward, weight


def _advantage(
    samples: Sequence[Sample], reward: Floats, term: Term, slot: int, state: AdvantageState
) -> tuple[Floats, AdvantageState]:
    key = keys(samples, term.key)
    group, distinct = codes(key)
    if term.advantage:
        return own_advantages(term.advantage, samples, reward, group), state
    unit, unit_group, value, weight = units(samples, reward, group, term)
    stats = spread(value, unit_group, weight, len(distinct), term.ddof)
    baseline = np.zeros(len(samples))
    if term.baseline == "mean":
        baseline = stats.mean[group]
    elif term.baseline == "max":
        baseline = stats.maximum[group]
    elif term.baseline == "leave_one_out":
        others = stats.weight[unit_group] - weight
        rest = (stats.weight * stats.mean)[unit_group] - weight * value
        baseline = (rest / np.where(others > 0, others, 1.0))[unit]
    elif term.baseline == "ema":
        names = [f"{slot} {'/'.join(map(str, k))}" for k in distinct if isinstance(k, tuple)]
        averages, state = _update_ema(names, stats.mean, term.decay, state)
        baseline = averages[group]
    advantage = reward - baseline
    largest = np.zeros(len(distinct))
    np.maximum.at(largest, group, np.abs(reward))
    advantage[np.abs(advantage) <= FLAT * largest[group]] = 0.0  # all that is left is rounding
    if term.scale == "std" and term.scale_key is not None:
        advantage = advantage / _deviation(samples, advantage, term)
    elif term.scale == "std":
        deviation = np.where(stats.flat, 1.0, np.sqrt(stats.variance) + term.eps)
        advantage = advantage / deviation[group]
    if term.compares:
        advantage = np.where(stats.flat[group], 0.0, advantage)
    return advantage, state


def _deviation(samples: Sequence[Sample], advantage: Floats, term: Term) -> Floats:
    """[n] standard deviation of the advantages over `scale_key`, plus eps; 1 where they are all equal."""
    assert term.scale_key is not None
    group, distinct = codes(keys(samples, term.scale_key))
    _, unit_group, value, weight = units(samples, advantage, group, term)
    stats = spread(value, unit_group, weight, len(distinct), term.ddof)
    return np.where(stats.flat, 1.0, np.sqrt(stats.variance) + term.eps)[group]


def _update_ema(
    names: Sequence[str], mean: Floats, decay: float, state: AdvantageState
) -> tuple[Floats, AdvantageState]:
    """b <- decay b + (1 - decay) mean, from 0; returned is the b after the update, which the rewards are held to.

    First the update, then the subtraction (SPIRAL, arXiv 2506.24119). The paper updates once per game; here it is
    once per step with the mean of the group, so that the order in which episodes end does not matter.
    """
    old = np.array([state.ema.get(name, 0.0) for name in names])
    new = decay * old + (1.0 - decay) * mean
    return new, AdvantageState({**state.ema, **dict(zip(names, new.tolist(), strict=True))})
