"""Reward attribution: the one number that each sample answers for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from cotune.algorithms.samples import Bools, Codes, Floats, Sample, codes, keys
from tests.core.algorithms.oracle.recipes import PROMPT_KEY, Attribution


def attribute(samples: Sequence[Sample], attribution: Attribution, key: tuple[str, ...] = PROMPT_KEY) -> Floats:
    """[n] reward of each sample, NaN where a component that it needs never arrived.

    A component that any candidate of a role carries is needed of all candidates of that role in its group (by `key`,
    within a task; of the role in the task where later turns are summed up, over groups), and one that any episode of a
    task carries of all episodes of that task; a component of weight 0 is never needed. `samples` must be all of a step:
    later turns and other roles are looked up among the chosen ones.

    An episode that the policy failed adds its `failure` to the reward, after weights and gates: a number, or with
    `lowest` the least that the outcomes of the other episodes of the step add for the role (for any role, where it
    played in none that ended), and at most 0. If the episode lacks a gate, own components above 0 count nothing.
    """
    own, outcome = _mixed(samples, attribution, key)
    mine, shared, counts = own.value - overlong(samples, attribution), outcome.value, outcome.some
    gate = _gates(samples, attribution)
    shut = np.isnan(gate) & np.array([s.failure is not None for s in samples], np.bool_)
    mine = np.where(shut, np.minimum(mine, 0.0), gate * mine)
    if attribution.takes_outcome:
        late = attribution.timeout_penalty * np.array([s.timed_out for s in samples], np.float64)
        shared, counts = _with_failures(samples, gate * (shared - late), counts, late)
    some = own.some | counts
    if attribution.horizon in ("reward_to_go", "mean_to_go"):
        value = _reward_to_go(samples, mine, shared, attribution.gamma)
        if attribution.horizon == "mean_to_go":
            value = value / _reward_to_go(samples, np.ones(len(samples)), np.zeros(len(samples)), attribution.gamma)
    else:
        value = mine + shared
    reward = np.where(some, value, np.nan)
    if attribution.scope == "own":
        return reward
    return _over_roles(samples, reward, some, mean=attribution.scope == "mean")


def without_outcome(samples: Sequence[Sample], attribution: Attribution, key: tuple[str, ...] = PROMPT_KEY) -> Bools:
    """[n] whether the episode of a sample failed without a whole outcome of its own, so that `failure` stands for it.
    Where the reward takes no outcome in, so has every one that failed."""
    _, outcome = _mixed(samples, attribution, key)
    return _unknown(samples, _gates(samples, attribution) * outcome.value, outcome.some)


def lacking(
    samples: Sequence[Sample], attribution: Attribution, key: tuple[str, ...] = PROMPT_KEY
) -> set[tuple[str, str]]:
    """(role, component) where a sample of the role has other components, but not this one, which it needs."""
    return {
        (samples[i].role, name)
        for mixed in _mixed(samples, attribution, key)
        for name, misses in mixed.lacks.items()
        for i in np.flatnonzero(misses)
    }


def _mixed(samples: Sequence[Sample], attribution: Attribution, key: tuple[str, ...]) -> tuple[_Mixed, _Mixed]:
    """The own components and those of the outcome, as far as the horizon takes them in."""
    within = () if attribution.horizon in ("reward_to_go", "mean_to_go") else key
    peers = codes(keys(samples, tuple(dict.fromkeys(("task", "role", *within)))))[0]
    task = codes([s.task for s in samples])[0]
    own_turn = attribution.horizon == "own_turn" and not attribution.outcome
    roles = [s.role for s in samples]
    mine = [{} if attribution.horizon == "terminal" else s.rewards for s in samples]
    own = _mix(mine, roles, peers, attribution, {})
    shared = [{} if own_turn else s.outcome for s in samples]
    outcome = _mix(shared, roles, task, attribution, own.carried, outcome=True)
    return own, outcome


def weight_of(component: str, role: str, attribution: Attribution, *, outcome: bool = False) -> float:
    """Weight of a component of a candidate, or of its episode's outcome, in the mixed reward of a role."""
    other = 0.0 if component in attribution.gates else attribution.other
    if attribution.seats and outcome:
        other = float(component == role)
    weight = attribution.weights.get(f"{role}/{component}", attribution.weights.get(component, other))
    return weight * (attribution.team_weight if component == "team" else 1.0)


def attribute_siblings(
    rewards: Sequence[Mapping[str, float]], role: str, attribution: Attribution, lengths: Sequence[Length] = ()
) -> Floats:
    """[n] own-turn reward of the candidates of one call by `role`: what `attribute` gives them, to select by.

    `lengths` are those of the candidates; none: their rewards alone count.
    """
    roles = [role] * len(rewards)
    own = _mix(rewards, roles, np.zeros(len(rewards), np.int64), attribution, {})
    penalty = _overlong(lengths, attribution) if rewards and lengths and attribution.overlong_penalty else 0.0
    gate = _gate(rewards, roles, attribution) if attribution.gates else 1.0
    return np.where(own.some, gate * (own.value - penalty), np.nan)


def _with_failures(samples: Sequence[Sample], mixed: Floats, counts: Bools, late: Floats) -> tuple[Floats, Bools]:
    """([n] reward, [n] whether it counts): `mixed` and `counts`, but the failure less `late` for a failed episode
    without a whole outcome of its own. A failure counts for the roles that outcomes count for, or where none is known.
    """
    failed = np.array([s.failure is not None for s in samples], np.bool_)
    stated = np.array([s.failure if isinstance(s.failure, float) else np.nan for s in samples])
    role, names = codes([s.role for s in samples])
    lowest = np.zeros(len(names))
    ended = counts & ~failed & ~np.isnan(mixed)
    np.minimum.at(lowest, role[ended], mixed[ended])
    lowest[np.bincount(role, ended, len(names)) == 0] = np.min(mixed[ended], initial=0.0)
    weighs = np.bincount(role, counts & ~failed, len(names)) > 0
    unseen = np.bincount(role, np.array([bool(s.outcome) for s in samples], np.bool_) & ~failed, len(names)) == 0
    here = _unknown(samples, mixed, counts)
    value = np.where(np.isnan(stated), lowest[role], stated) - late
    counted = (weighs | unseen)[role]
    return np.where(here, np.where(counted, value, 0.0), mixed), np.where(here, counted, counts)


def _unknown(samples: Sequence[Sample], mixed: Floats, counts: Bools) -> Bools:
    failed = np.array([s.failure is not None for s in samples], np.bool_)
    return failed & (np.isnan(mixed) | ~counts)


def _gates(samples: Sequence[Sample], attribution: Attribution) -> Floats:
    return _gate([{**s.outcome, **s.rewards} for s in samples], [s.role for s in samples], attribution)


def _gate(rewards: Sequence[Mapping[str, float]], roles: Sequence[str], attribution: Attribution) -> Floats:
    """[n] product of the gates: NaN where one is missing that others of the role carry, 1 where none of them does."""
    gate = np.ones(len(rewards))
    for name in attribution.gates:
        carrying = {role for role, components in zip(roles, rewards, strict=True) if name in components}
        pairs = zip(roles, rewards, strict=True)
        gate *= np.array([found.get(name, np.nan if role in carrying else 1.0) for role, found in pairs])
    return gate


class Length(NamedTuple):
    """Tokens of an answer, the most that it could have (None: unknown), and whether it was cut there."""

    tokens: int
    limit: int | None
    truncated: bool


def overlong(samples: Sequence[Sample], attribution: Attribution) -> Floats:
    """[n] what each sample loses by its length: the penalty times 0 up to `overlong_buffer` tokens before its limit,
    rising to 1 at the limit, and 1 for an answer that was cut (arXiv 2503.14476, equation 13, with the sign turned)."""
    return _overlong([Length(s.tokens, s.limit, s.truncated) for s in samples], attribution)


def _overlong(lengths: Sequence[Length], attribution: Attribution) -> Floats:
    buffer = attribution.overlong_buffer
    shares = [
        1.0 if cut else 0.0 if limit is None or not buffer else min(max((tokens - limit + buffer) / buffer, 0.0), 1.0)
        for tokens, limit, cut in lengths
    ]
    return attribution.overlong_penalty * np.array(shares, np.float64)


class _Mixed(NamedTuple):
    value: Floats
    """Weighted sum of the needed components: 0 where none is needed, NaN where one is missing."""
    some: Bools
    """Whether any component is needed."""
    carried: Mapping[str, Bools]
    """By component: whether anyone in the sample's group carries it."""
    lacks: Mapping[str, Bools]
    """By component: whether the sample needs it and has others, but not this one."""


def _mix(
    rewards: Sequence[Mapping[str, float]],
    roles: Sequence[str],
    group: Codes,
    attribution: Attribution,
    taken: Mapping[str, Bools],
    *,
    outcome: bool = False,
) -> _Mixed:
    value = np.zeros(len(rewards))
    some = np.zeros(len(rewards), np.bool_)
    carried: dict[str, Bools] = {}
    lacks: dict[str, Bools] = {}
    arrived = np.array(list(map(bool, rewards)), np.bool_)
    for name in dict.fromkeys(chain.from_iterable(rewards)):
        weights = {role: weight_of(name, role, attribution, outcome=outcome) for role in dict.fromkeys(roles)}
        weight = np.array([weights[role] for role in roles])
        if not weight.any():
            continue
        column = np.array([components.get(name, np.nan) for components in rewards])
        carried[name] = (np.bincount(group, ~np.isnan(column)) > 0)[group] & (weight != 0.0)
        needed = carried[name] & ~taken[name] if name in taken else carried[name]
        if attribution.absent is not None:
            column = np.where(np.isnan(column) & arrived, attribution.absent, column)
        lacks[name] = needed & arrived & np.isnan(column)
        value = value + np.where(needed, weight * column, 0.0)
        some |= needed
    return _Mixed(value, some, carried, lacks)


def _reward_to_go(samples: Sequence[Sample], own: Floats, outcome: Floats, gamma: float) -> Floats:
    """G_t = r_t + gamma^(t' - t) G_t' over the role's next chosen turn t' in the episode; the last adds the outcome.

    Siblings that were not chosen share the future of the one that was.
    """
    chain, _ = codes([(s.rollout, s.role) for s in samples])
    turn = np.array([s.turn for s in samples], np.int64)
    chosen = np.array([s.chosen for s in samples], np.bool_)
    returns = np.empty(len(samples))
    current, after, at = -1, 0.0, 0
    for i in np.lexsort((chosen, -turn, chain)):
        if chain[i] != current:
            current, after, at = int(chain[i]), float(outcome[i]), int(turn[i])
        returns[i] = own[i] + gamma ** (at - int(turn[i])) * after
        if chosen[i]:
            after, at = float(returns[i]), int(turn[i])
    return returns


def _over_roles(samples: Sequence[Sample], reward: Floats, some: Bools, *, mean: bool) -> Floats:
    """Sum or mean over the roles that act in a turn of an episode and have `some` reward: own reward, the others' as
    chosen."""
    moment, _ = codes([(s.rollout, s.turn) for s in samples])
    part, _ = codes([(s.rollout, s.turn, s.role) for s in samples])
    went_on = some & np.array([s.chosen for s in samples], np.bool_)
    chosen_reward = np.where(went_on, reward, 0.0)
    others = np.bincount(moment, chosen_reward)[moment] - np.bincount(part, chosen_reward)[part]
    count = 1 + np.bincount(moment, went_on)[moment] - np.bincount(part, went_on)[part]
    total = reward + others
    return total / count if mean else total
