"""Advantages: how much better than its peers each sample did. Pure functions over arrays, [n] of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.samples import Floats, Sample, codes, keys
from cotune.errors import GroupError
from tests.core.algorithms.oracle.attribution import attribute
from tests.core.algorithms.oracle.baselines import BASELINES, FLAT, Compared, spread, units
from tests.core.algorithms.oracle.recipes import Shaping, Term


class AdvantageState(msgspec.Struct, frozen=True):
    """What advantages remember from step to step: the moving averages, by term and group key."""

    ema: Mapping[str, float] = {}


def advantages(
    samples: Sequence[Sample],
    terms: Sequence[Term],
    state: AdvantageState | None = None,
    rewards: Sequence[Floats] | None = None,
    part: str = "",
) -> tuple[Floats, AdvantageState]:
    """[n] weighted sum of the terms' advantages, and the state for the next step.

    `rewards` are the attributed rewards of each term, [n] each; without them they are attributed here. Moving averages
    of another `part` are others (`prepare`). Raises
    GroupError when a sample lacks a reward that a term needs.
    """
    if rewards is None:
        rewards = [attribute(samples, term.attribution, term.key) for term in terms]
    if any(np.isnan(r).any() for r in rewards):
        raise GroupError("A sample lacks a reward component that the recipe needs.", "Leave it out before.")
    state = state or AdvantageState()
    total = np.zeros(len(samples))
    for slot, (term, reward) in enumerate(zip(terms, rewards, strict=True)):
        if len(samples):
            advantage, state = _advantage(samples, reward, term, f"{part} {slot}".strip(), state)
            total += term.weight * advantage
    return total, state


def _advantage(
    samples: Sequence[Sample], reward: Floats, term: Term, slot: str, state: AdvantageState
) -> tuple[Floats, AdvantageState]:
    group, distinct = codes(keys(samples, term.key))
    counted = units(samples, reward, group, term.unit)
    stats = spread(counted, len(distinct), term.ddof)
    average = np.zeros(0)
    if term.baseline == "ema":
        names = [f"{slot} {'/'.join(map(str, key))}" for key in distinct if isinstance(key, tuple)]
        average, state = _update_ema(names, stats.mean, term.decay, state)
    advantage = reward - BASELINES[term.baseline](Compared(group, counted, stats, average))
    largest = np.zeros(len(distinct))
    np.maximum.at(largest, group, np.abs(reward))
    advantage[np.abs(advantage) <= FLAT * largest[group]] = 0.0  # all that is left is rounding
    if term.scale == "std":
        advantage = advantage / _deviation(samples, reward if term.scale_key is None else advantage, term)
    if term.compares:
        advantage = np.where(stats.flat[group], 0.0, advantage)
    return advantage, state


def _deviation(samples: Sequence[Sample], values: Floats, term: Term) -> Floats:
    """[n] standard deviation of the values over `scale_key`, else the term's key, plus eps; 1 where they are equal."""
    group, distinct = codes(keys(samples, term.key if term.scale_key is None else term.scale_key))
    stats = spread(units(samples, values, group, term.unit), len(distinct), term.ddof)
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


def shape(samples: Sequence[Sample], advantages: Floats, shaping: Shaping) -> Floats:
    """[n] advantages with the term of Advantage Alignment (arXiv 2406.14662; for language models 2511.19405):

        A*_t = A_t + opponent * (sum over k < t of opponent_gamma^(t - k) A_k) * B_t

    A_t is the role's own advantage at its turn t of the episode, B_t the sum of the other roles' at that turn. What the
    other has gained where one's own past was good is encouraged, and the reverse. A turn that is not there counts 0.
    """
    if not shaping.opponent:
        return advantages
    own: dict[tuple[str, str], dict[int, float]] = {}
    total: dict[tuple[str, int], float] = {}
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        own.setdefault((sample.rollout, sample.role), {})[sample.turn] = advantage
    for (rollout, _), turns in own.items():
        for turn, advantage in turns.items():
            total[rollout, turn] = total.get((rollout, turn), 0.0) + advantage
    shaped = advantages.copy()
    for i, sample in enumerate(samples):
        turns = own[sample.rollout, sample.role]
        past = sum(shaping.opponent_gamma ** (sample.turn - k) * a for k, a in turns.items() if k < sample.turn)
        shaped[i] += shaping.opponent * past * (total[sample.rollout, sample.turn] - turns[sample.turn])
    return np.asarray(shaped)
