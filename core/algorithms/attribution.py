"""Turn named rewards into one number for each sample: weights, gates, penalties, failures, later turns, other roles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Bools, Codes, Floats, Sample, codes, keys


class Weighed(NamedTuple):
    """The rewards of samples, [n] each: from the candidates and from the outcomes of their episodes."""

    own: Floats
    """Weighted sum of the candidate's components; NaN if one is missing, 0 if none counts."""
    outcome: Floats
    """Weighted sum of the outcome's components, likewise, with failures (`reward_failures`)."""
    counts: Bools
    """Whether any component counts for the sample."""
    outcome_missing: Bools
    """Whether the episode failed without a complete outcome, so that its failure replaces the outcome."""
    lacking: frozenset[tuple[str, str]]
    """(role, component) that a sample of the role needs and lacks, although it has other components."""

    def total(self) -> Floats:
        """The sum of `own` and `outcome`; NaN for samples whose reward is not known."""
        return np.where(self.counts, self.own + self.outcome, np.nan)


def weigh_rewards(
    samples: Sequence[Sample],
    attribution: Attribution,
    group_by: Sequence[str],
    *,
    own: bool,
    outcome: bool,
    later_turns: bool = False,
) -> Weighed:
    """Compute the weighted sums of the reward components of all samples of a step.

    `own` and `outcome` say whether the components of candidates and of episodes count. With `later_turns`, the caller
    adds up the rewards of a role's turns.

    If any candidate of a role has a component, all candidates of that role in its group (`group_by`, within a task)
    need it; with `later_turns`, all candidates of the role in the task, as the sums span groups. If any episode of a
    task has a component, all episodes of the task need it. A component of weight 0 is never needed.
    """
    roles = [sample.role for sample in samples]
    fields_of_peers: tuple[str, ...] = ("task", "role")
    if not later_turns:
        fields_of_peers += tuple(field for field in group_by if field not in fields_of_peers)
    peers, _ = codes(keys(samples, fields_of_peers))
    tasks, _ = codes([sample.task for sample in samples])

    # 1. Weighted sums. If a candidate has a component, the outcome's component of that name does not count again.
    own_components: list[Mapping[str, float]] = [{}] * len(samples)
    outcome_components = own_components
    if own:
        own_components = [sample.rewards for sample in samples]
    if outcome:
        outcome_components = [sample.outcome for sample in samples]
    own_sum = _weighted_sum(own_components, roles, peers, attribution)
    outcome_sum = _weighted_sum(outcome_components, roles, tasks, attribution, skip=own_sum.needed, of_outcome=True)

    # 2. Penalties, and gates, which multiply. A failed episode may lack its gate: then only negative rewards count.
    failed = np.array([sample.failure is not None for sample in samples], np.bool_)
    gate = np.ones(len(samples))
    if attribution.gates:
        gate = _gate_product([{**sample.outcome, **sample.rewards} for sample in samples], roles, attribution)
    penalized = own_sum.value - overlong_penalties(samples, attribution)
    gate_missing = failed & np.isnan(gate)
    own_value = np.where(gate_missing, np.minimum(penalized, 0.0), gate * penalized)

    # 3. The outcome. If a failed episode has no complete outcome, its failure replaces it (`reward_failures`).
    outcome_value = outcome_sum.value
    outcome_counts = outcome_sum.counts
    outcome_unknown = np.isnan(gate * outcome_value) | ~outcome_counts
    outcome_missing = failed & outcome_unknown
    if outcome:
        late = attribution.timeout_penalty * np.array([sample.timed_out for sample in samples], np.float64)
        gated = gate * (outcome_value - late)
        outcome_value, outcome_counts = reward_failures(samples, gated, outcome_counts, late)
    return Weighed(
        own=own_value,
        outcome=outcome_value,
        counts=own_sum.counts | outcome_counts,
        outcome_missing=outcome_missing,
        lacking=own_sum.lacking | outcome_sum.lacking,
    )


def weight_of(component: str, role: str, attribution: Attribution, *, outcome: bool = False) -> float:
    """The weight of a reward component (a named reward) in the reward of a role.

    The component belongs to a candidate, or with `outcome` to the candidate's episode.
    """
    if f"{role}/{component}" in attribution.weights:
        weight = attribution.weights[f"{role}/{component}"]
    elif component in attribution.weights:
        weight = attribution.weights[component]
    elif attribution.seats and outcome:
        # In a game, an outcome such as {"white": 1, "black": -1} has a component for each role.
        weight = float(component == role)
    elif component in attribution.gates:
        weight = 0.0  # a gate multiplies the sum, and is not added to it
    else:
        weight = attribution.other
    if component == "team":
        weight *= attribution.team_weight
    return weight


class _WeightedSum(NamedTuple):
    value: Floats
    """Weighted sum of the needed components; NaN if one is missing."""
    counts: Bools
    """Whether any component is needed."""
    needed: Sequence[Collection[str]]
    """The components that each sample needs."""
    lacking: frozenset[tuple[str, str]]
    """(role, component) that samples need and lack, although they have other components."""


def _weighted_sum(
    rewards: Sequence[Mapping[str, float]],
    roles: Sequence[str],
    peers: Codes,
    attribution: Attribution,
    *,
    skip: Sequence[Collection[str]] = (),
    of_outcome: bool = False,
) -> _WeightedSum:
    """Weighted sums of the reward components of samples, [n].

    `rewards` has the components of each sample by name. Samples with the same number in `peers`, [n], are compared with
    each other: if one of them has a component, all of them need it. `skip` has the components of each sample that do
    not count here; empty if all count.
    """
    weights = _needed_weights(rewards, roles, peers, attribution, of_outcome=of_outcome)
    sums: list[float] = []
    needed_names: list[Collection[str]] = []
    lacking: set[tuple[str, str]] = set()
    for i, components in enumerate(rewards):
        role = roles[i]
        skipped_names = skip[i] if skip else ()
        weighted_sum = 0.0
        names: list[str] = []
        for name, weight in weights[int(peers[i]), role].items():
            if name in skipped_names:
                continue
            names.append(name)
            if name in components:
                weighted_sum += weight * components[name]
            elif components and attribution.absent is not None:  # the configured value of a missing component
                weighted_sum += weight * attribution.absent
            else:
                weighted_sum = np.nan
                # A sample without any component has no reward at all, which is another fault than a missing component.
                if components:
                    lacking.add((role, name))
        sums.append(weighted_sum)
        needed_names.append(names)
    counts = np.array([bool(names) for names in needed_names], np.bool_)
    return _WeightedSum(np.array(sums, np.float64), counts, needed_names, frozenset(lacking))


def _needed_weights(
    rewards: Sequence[Mapping[str, float]],
    roles: Sequence[str],
    peers: Codes,
    attribution: Attribution,
    *,
    of_outcome: bool,
) -> dict[tuple[int, str], dict[str, float]]:
    """The weights of the components that samples need, by the number of their set of peers and their role.

    They are the components that any of the peers has, except those of weight 0.
    """
    components_of_peers: dict[int, dict[str, None]] = defaultdict(dict)  # dictionaries keep the components in order
    for peer_set, components in zip(peers.tolist(), rewards, strict=True):
        components_of_peers[peer_set].update(dict.fromkeys(components))

    weights: dict[tuple[int, str], dict[str, float]] = {}
    for peer_set, role in dict.fromkeys(zip(peers.tolist(), roles, strict=True)):
        weights[peer_set, role] = {}
        for name in components_of_peers[peer_set]:
            weight = weight_of(name, role, attribution, outcome=of_outcome)
            if weight != 0.0:
                weights[peer_set, role][name] = weight
    return weights


def reward_failures(
    samples: Sequence[Sample], outcome_rewards: Floats, outcome_counts: Bools, late_penalties: Floats
) -> tuple[Floats, Bools]:
    """Give episodes that failed a reward, so that a failure is never better than a finished episode.

    A failed episode without a complete outcome gets the number that the user configured (`Sample.failure`). With
    "lowest" it gets the lowest reward of its role in any finished episode of this step (of any role, if its role
    finished none), or 0 if all these rewards are positive. `late_penalties`, [n], are subtracted from both.

    Args:
        outcome_rewards: [n] weighted sum of the outcome's components; NaN if one is missing.
        outcome_counts: [n] whether any component of the outcome has a weight for the sample's role.

    Returns copies of both arrays, with the failures.
    """
    rewards = outcome_rewards.copy()
    counts = outcome_counts.copy()

    # 1. The lowest reward of each role in finished episodes, and the roles that outcomes count for.
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
                # The minimum includes 0, so that a failure never has a positive reward.
                lowest_so_far = lowest_of_role.get(sample.role, 0.0)
                lowest_of_role[sample.role] = min(lowest_so_far, float(rewards[i]))
    lowest_of_all = min(lowest_of_role.values(), default=0.0)

    # 2. The rewards of failed episodes without a complete outcome.
    for i, sample in enumerate(samples):
        outcome_is_complete = counts[i] and not np.isnan(rewards[i])
        if sample.failure is None or outcome_is_complete:
            continue
        # A role that has no outcome in finished episodes must not get one in failed episodes.
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

    Candidates that were not chosen have the same future as the chosen one. Returns [n].
    """
    returns = np.empty(len(samples))
    indices_by_role: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        indices_by_role[sample.rollout, sample.role].append(i)
    for indices in indices_by_role.values():
        # From the last turn to the first. In each turn the chosen candidate comes last: earlier turns need its return.
        indices.sort(key=lambda i: (-samples[i].turn, samples[i].chosen))
        # The episode's outcome comes after the last turn, so it is not discounted for that turn.
        last = indices[0]
        future_return = float(outcome[last])
        future_turn = samples[last].turn
        for i in indices:
            turn = samples[i].turn
            returns[i] = own[i] + gamma ** (future_turn - turn) * future_return
            if samples[i].chosen:
                future_return = float(returns[i])
                future_turn = turn
    return returns


def over_roles(samples: Sequence[Sample], rewards: Floats, has_reward: Bools, *, mean: bool) -> Floats:
    """The reward of each sample, combined with the rewards of the other roles that act in the same turn of its
    episode, [n].

    It is the sum over the sample and these roles, or with `mean` their mean. Another role takes part with the reward of
    its chosen candidate, if that one `has_reward`, [n].
    """
    # The sum and the number of the chosen candidates' rewards, for each turn of an episode and each role in it.
    sum_of_turn: dict[tuple[str, int], float] = defaultdict(float)
    sum_of_role: dict[tuple[str, int, str], float] = defaultdict(float)
    number_in_turn: Counter[tuple[str, int]] = Counter()
    number_of_role: Counter[tuple[str, int, str]] = Counter()
    for i, sample in enumerate(samples):
        if sample.chosen and has_reward[i]:
            turn = (sample.rollout, sample.turn)
            role_in_turn = (*turn, sample.role)
            sum_of_turn[turn] += float(rewards[i])
            sum_of_role[role_in_turn] += float(rewards[i])
            number_in_turn[turn] += 1
            number_of_role[role_in_turn] += 1

    combined = np.empty(len(samples))
    for i, sample in enumerate(samples):
        turn = (sample.rollout, sample.turn)
        role_in_turn = (*turn, sample.role)
        # The sample itself takes part instead of the chosen candidate of its role.
        reward_of_others = sum_of_turn[turn] - sum_of_role[role_in_turn]
        number_of_others = number_in_turn[turn] - number_of_role[role_in_turn]
        combined[i] = rewards[i] + reward_of_others
        if mean:
            combined[i] /= 1 + number_of_others
    return combined


def _gate_product(rewards: Sequence[Mapping[str, float]], roles: Sequence[str], attribution: Attribution) -> Floats:
    """[n] product of the gates. A missing gate is NaN if other samples of the role have it, and 1 if none has it."""
    product = np.ones(len(rewards))
    for gate in attribution.gates:
        roles_with_gate = {role for role, components in zip(roles, rewards, strict=True) if gate in components}
        for i, (role, components) in enumerate(zip(roles, rewards, strict=True)):
            if gate in components:
                product[i] *= components[gate]
            elif role in roles_with_gate:
                product[i] = np.nan
    return product


class Length(NamedTuple):
    """Tokens of an answer, its limit (None: unknown), and whether it was cut at the limit."""

    tokens: int
    limit: int | None
    truncated: bool


def overlong_penalties(samples: Sequence[Sample], attribution: Attribution) -> Floats:
    """[n] penalty of each sample for its length: `overlong_penalty` times a share that is 0 up to `overlong_buffer`
    tokens before its limit, rises to 1 at the limit, and is 1 for an answer that was cut (arXiv 2503.14476, equation
    13, with the opposite sign)."""
    if not attribution.overlong_penalty:
        return np.zeros(len(samples))
    return _penalties_by_length([Length(s.tokens, s.limit, s.truncated) for s in samples], attribution)


def _penalties_by_length(lengths: Sequence[Length], attribution: Attribution) -> Floats:
    """[n] penalties by length, as in `overlong_penalties`, for lengths without their samples."""
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
    """The rewards, [n], that decide which candidate of a call becomes the answer. NaN for a candidate without a
    reward.

    They are the candidates' own rewards as `weigh_rewards` computes them for training: weighted components, less the
    penalty for too long answers, times the gate. `lengths` are the lengths of the candidates; without them there is no
    penalty.
    """
    roles = [role] * len(rewards)
    all_are_peers = np.zeros(len(rewards), np.int64)
    weighted_sum = _weighted_sum(rewards, roles, all_are_peers, attribution)
    value = weighted_sum.value
    if rewards and lengths and attribution.overlong_penalty:
        value = value - _penalties_by_length(lengths, attribution)
    if attribution.gates:
        value = value * _gate_product(rewards, roles, attribution)
    return np.where(weighted_sum.counts, value, np.nan)
