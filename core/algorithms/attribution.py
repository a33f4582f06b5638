"""From named rewards to one number for each sample: weights, gates, penalties, failures, later turns, other roles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Bools, Codes, Floats, Sample, codes, keys


class Weighed(NamedTuple):
    """The rewards of samples, [n] each, of their own and of the outcome of their episode."""

    own: Floats
    """Weighted sum of the own components; NaN if one is missing, 0 if none counts."""
    outcome: Floats
    """The same of the components of the outcome, with failures (`reward_failures`)."""
    counts: Bools
    """Whether any component counts for the sample."""
    outcome_missing: Bools
    """Whether the episode failed without a whole outcome of its own, so that its failure takes the outcome's place."""
    lacking: frozenset[tuple[str, str]]
    """(role, component) that a sample of the role lacks although it has others, and that it needs."""

    def total(self) -> Floats:
        """The sum of both; NaN for samples whose reward is not known."""
        return np.where(self.counts, self.own + self.outcome, np.nan)


def weigh(
    samples: Sequence[Sample],
    attribution: Attribution,
    group_by: Sequence[str],
    *,
    own: bool,
    outcome: bool,
    later_turns: bool = False,
) -> Weighed:
    """Weigh the rewards of all samples of a step.

    A component that any candidate of a role carries is needed of all candidates of that role in its group (`group_by`,
    within a task). With `later_turns`, whose rewards are summed up over groups, it is needed of the role in the whole
    task. A component that any episode of a task carries is needed of all its episodes. A component of weight 0 is never
    needed.

    An episode that the policy failed has its failure in place of the outcome (`reward_failures`).
    """
    roles = [sample.role for sample in samples]
    peers_by = ("task", "role") if later_turns else tuple(dict.fromkeys(("task", "role", *group_by)))
    peers, _ = codes(keys(samples, peers_by))
    tasks, _ = codes([sample.task for sample in samples])

    # 1. Weighted sums. A component that a candidate has of its own is not taken from the outcome again.
    own_components = [sample.rewards if own else {} for sample in samples]
    mine = _weighted_sum(own_components, roles, peers, attribution)
    outcome_components = [sample.outcome if outcome else {} for sample in samples]
    shared = _weighted_sum(outcome_components, roles, tasks, attribution, skip=mine.needed, of_outcome=True)

    # 2. Penalties and gates. Without the gate of a failed episode nobody knows whether its own rewards are deserved.
    failed = np.array([sample.failure is not None for sample in samples], np.bool_)
    gate = np.ones(len(samples))
    if attribution.gates:
        gate = _gate([{**sample.outcome, **sample.rewards} for sample in samples], roles, attribution)
    own_value = mine.value - overlong(samples, attribution)
    gate_missing = np.isnan(gate) & failed
    own_value = np.where(gate_missing, np.minimum(own_value, 0.0), gate * own_value)

    # 3. Failures take the place of outcomes that are not known.
    outcome_missing = failed & (np.isnan(gate * shared.value) | ~shared.counts)
    outcome_value, outcome_counts = shared.value, shared.counts
    if outcome:
        late = attribution.timeout_penalty * np.array([sample.timed_out for sample in samples], np.float64)
        outcome_value = gate * (shared.value - late)
        outcome_value, outcome_counts = reward_failures(samples, outcome_value, outcome_counts, late)
    return Weighed(
        own_value, outcome_value, mine.counts | outcome_counts, outcome_missing, mine.lacking | shared.lacking
    )


def weight_of(component: str, role: str, attribution: Attribution, *, outcome: bool = False) -> float:
    """Weight of a component of a candidate, or of its episode's outcome, in the reward of a role."""
    other = 0.0 if component in attribution.gates else attribution.other
    if attribution.seats and outcome:
        other = float(component == role)
    weight = attribution.weights.get(f"{role}/{component}", attribution.weights.get(component, other))
    return weight * (attribution.team_weight if component == "team" else 1.0)


class _WeightedSum(NamedTuple):
    value: Floats
    """Weighted sum of the needed components; NaN if one is missing."""
    counts: Bools
    """Whether any component is needed."""
    needed: Sequence[Collection[str]]
    """The components that each sample needs."""
    lacking: frozenset[tuple[str, str]]
    """(role, component) that samples need and lack although they have others."""


def _weighted_sum(
    rewards: Sequence[Mapping[str, float]],
    roles: Sequence[str],
    peers: Codes,
    attribution: Attribution,
    *,
    skip: Sequence[Collection[str]] = (),
    of_outcome: bool = False,
) -> _WeightedSum:
    """Weighted sums of components, [n]; `skip` are components of each sample that do not count here."""
    carried: dict[int, dict[str, None]] = defaultdict(dict)
    for peer, components in zip(peers.tolist(), rewards, strict=True):
        carried[peer].update(dict.fromkeys(components))

    weights: dict[tuple[int, str], list[tuple[str, float]]] = {}
    values: list[float] = []
    needed: list[Collection[str]] = []
    lacking: set[tuple[str, str]] = set()
    for i, (peer, role, components) in enumerate(zip(peers.tolist(), roles, rewards, strict=True)):
        if (peer, role) not in weights:
            named = [(name, weight_of(name, role, attribution, outcome=of_outcome)) for name in carried[peer]]
            weights[peer, role] = [(name, weight) for name, weight in named if weight != 0.0]
        total = 0.0
        names: list[str] = []
        for name, weight in weights[peer, role]:
            if skip and name in skip[i]:
                continue
            names.append(name)
            if name in components:
                total += weight * components[name]
            elif components and attribution.absent is not None:
                total += weight * attribution.absent
            else:
                total = np.nan
                if components:
                    lacking.add((role, name))
        values.append(total)
        needed.append(names)
    counts = np.array([bool(names) for names in needed], np.bool_)
    return _WeightedSum(np.array(values, np.float64), counts, needed, frozenset(lacking))


def reward_failures(
    samples: Sequence[Sample], rewards: Floats, counts: Bools, late_penalties: Floats
) -> tuple[Floats, Bools]:
    """Give episodes that failed a reward, so that failing never pays better than finishing.

    A failed episode without a whole outcome of its own gets the number that the user configured (`Sample.failure`), or,
    with "lowest", the lowest reward of its role in any finished episode of this step (of any role, if its own finished
    none), but at most 0.

    Returns the rewards, [n], and whether each counts, [n].
    """
    rewards, counts = rewards.copy(), counts.copy()
    lowest_of_role: dict[str, float] = {}
    roles_with_outcome: set[str] = set()
    roles_that_finished: set[str] = set()
    for i, sample in enumerate(samples):
        if sample.failure is not None:
            continue
        if sample.outcome:
            roles_that_finished.add(sample.role)
        if counts[i]:
            roles_with_outcome.add(sample.role)
            if not np.isnan(rewards[i]):
                lowest_of_role[sample.role] = min(lowest_of_role.get(sample.role, 0.0), float(rewards[i]))
    lowest_of_all = min(lowest_of_role.values(), default=0.0)

    for i, sample in enumerate(samples):
        has_own_outcome = counts[i] and not np.isnan(rewards[i])
        if sample.failure is None or has_own_outcome:
            continue
        # A role that never earns an outcome when episodes finish must not lose one when they fail.
        counts[i] = sample.role in roles_with_outcome or sample.role not in roles_that_finished
        if not counts[i]:
            rewards[i] = 0.0
        elif sample.failure == "lowest":
            rewards[i] = lowest_of_role.get(sample.role, lowest_of_all) - late_penalties[i]
        else:
            rewards[i] = sample.failure - late_penalties[i]
    return rewards, counts


def reward_to_go(samples: Sequence[Sample], own: Floats, outcome: Floats, gamma: float) -> Floats:
    """G_t = r_t + gamma^(t' - t) G_t' over the role's next turn t' in the episode; the last turn adds the outcome.

    Candidates that were not chosen share the future of the one that was. Returns [n].
    """
    returns = np.empty(len(samples))
    chains: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        chains[sample.rollout, sample.role].append(i)
    for chain in chains.values():
        # From the last turn to the first; of one turn the chosen candidate last, whose return its predecessors have.
        chain.sort(key=lambda i: (-samples[i].turn, samples[i].chosen))
        future, future_turn = float(outcome[chain[0]]), samples[chain[0]].turn
        for i in chain:
            turn = samples[i].turn
            returns[i] = own[i] + gamma ** (future_turn - turn) * future
            if samples[i].chosen:
                future, future_turn = float(returns[i]), turn
    return returns


def over_roles(samples: Sequence[Sample], rewards: Floats, counts: Bools, *, mean: bool) -> Floats:
    """Sum or mean over the roles that act in a turn of an episode and have a reward that `counts`: a sample's own
    reward, and those of the other roles as their chosen candidates earned them. Returns [n]."""
    moment, _ = codes([(s.rollout, s.turn) for s in samples])
    part, _ = codes([(s.rollout, s.turn, s.role) for s in samples])
    taken = counts & np.array([s.chosen for s in samples], np.bool_)
    chosen_reward = np.where(taken, rewards, 0.0)
    of_others = np.bincount(moment, chosen_reward)[moment] - np.bincount(part, chosen_reward)[part]
    total = rewards + of_others
    if not mean:
        return np.asarray(total)
    return np.asarray(total / (1 + np.bincount(moment, taken)[moment] - np.bincount(part, taken)[part]))


def _gate(rewards: Sequence[Mapping[str, float]], roles: Sequence[str], attribution: Attribution) -> Floats:
    """[n] product of the gates. A gate is NaN if it is missing and others of the role carry it, and 1 if none does."""
    gate = np.ones(len(rewards))
    for name in attribution.gates:
        carrying = {role for role, components in zip(roles, rewards, strict=True) if name in components}
        for i, (role, components) in enumerate(zip(roles, rewards, strict=True)):
            gate[i] *= components.get(name, np.nan if role in carrying else 1.0)
    return gate


class Length(NamedTuple):
    """Tokens of an answer, the most that it could have (None: unknown), and whether it was cut there."""

    tokens: int
    limit: int | None
    truncated: bool


def overlong(samples: Sequence[Sample], attribution: Attribution) -> Floats:
    """[n] what each sample loses by its length: the penalty times 0 up to `overlong_buffer` tokens before its limit,
    rising to 1 at the limit, and 1 for an answer that was cut (arXiv 2503.14476, equation 13, with the sign turned)."""
    if not attribution.overlong_penalty:
        return np.zeros(len(samples))
    return _overlong([Length(s.tokens, s.limit, s.truncated) for s in samples], attribution)


def _overlong(lengths: Sequence[Length], attribution: Attribution) -> Floats:
    buffer = attribution.overlong_buffer
    shares = np.zeros(len(lengths))
    for i, (tokens, limit, truncated) in enumerate(lengths):
        if truncated:
            shares[i] = 1.0
        elif limit is not None and buffer:
            shares[i] = min(max((tokens - limit + buffer) / buffer, 0.0), 1.0)
    return attribution.overlong_penalty * shares


def attribute_siblings(
    rewards: Sequence[Mapping[str, float]], role: str, attribution: Attribution, lengths: Sequence[Length] = ()
) -> Floats:
    """[n] own rewards of the candidates of one call by `role`, as `weigh` gives them: what a candidate is chosen by.

    `lengths` are those of the candidates; without them only their rewards count.
    """
    roles = [role] * len(rewards)
    own = _weighted_sum(rewards, roles, np.zeros(len(rewards), np.int64), attribution)
    penalty = _overlong(lengths, attribution) if rewards and lengths and attribution.overlong_penalty else 0.0
    gate = _gate(rewards, roles, attribution) if attribution.gates else 1.0
    return np.where(own.counts, gate * (own.value - penalty), np.nan)
