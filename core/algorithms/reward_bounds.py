"""The minimum and maximum reward of an episode of an evaluation, from the bounds that scorers declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cotune.algorithms.attribution import weight_of
from cotune.algorithms.goal import Goal, Played
from cotune.algorithms.recipes import Attribution

Bounds = tuple[float, float]
SHARE: Bounds = (0.0, 1.0)
"""Bounds of a component that nobody declares and whose values all lie between 0 and 1: true or false, or a share."""


def reward_bounds(played: Sequence[Played], goal: Goal) -> Bounds | None:
    """The lowest and highest reward that these episodes can have under a goal; None if they are unknown.

    A role's reward is a weighted sum of components, so its bounds are the weighted sums of the components' bounds. A
    scorer declares bounds for all that it returns (`Goal.bounds`). The reward of an episode is a mean over its roles,
    and lies within the bounds of all of them. Bounds are not known if no scorer declares any, or if a recipe multiplies
    rewards (gates), adds up turns or roles, or subtracts penalties.
    """
    if not goal.bounds:
        return None
    roles: set[str] = set()
    for episode in played:
        roles.update(sample.role for sample in episode.samples)
    if goal.roles is not None:
        trained: set[str] = set()
        for part in (goal, *goal.others):
            trained.update(part.roles or ())
        roles &= trained
    bounds: list[Bounds] = []
    for role in sorted(roles):
        if role in goal.taught:  # its reward is the mean of the other roles' rewards
            continue
        of_role = _bounds_of_role(role, goal.of_role(role), played)
        if of_role is None:
            return None
        bounds.append(of_role)
    if not bounds:
        return None
    # An episode that fails without any answer has only this reward.
    failure = _failure_bound(goal)
    return _enclosing_bounds(bounds if failure is None else [*bounds, (failure, failure)])


def _bounds_of_role(role: str, goal: Goal, played: Sequence[Played]) -> Bounds | None:
    """The lowest and highest reward that a role can have in an episode under this goal; None if they are unknown."""
    attribution = goal.attribution
    adds_up = goal.method.to_go or goal.method.joins_roles
    has_penalties = attribution.overlong_penalty or attribution.timeout_penalty
    if adds_up or has_penalties or attribution.gates or attribution.absent is not None:
        return None

    # 1. The rewards of the role's answers, each with its components by name.
    answer_rewards: list[Mapping[str, float]] = []
    if attribution.own:
        for episode in played:
            answer_rewards += [sample.rewards for sample in episode.samples if sample.role == role]
    answer_bounds = _bounds_of_sum(answer_rewards, role, attribution, goal.bounds.get(role), outcome=False)
    if answer_bounds is None or not attribution.outcome:
        return answer_bounds

    # 2. The outcome of its episodes. A component that the answers also have counts only there. If only some answers
    #    have it, some groups take it from the answers and others from the outcome, so the bounds are not known.
    names_in_answers = _names(answer_rewards)
    for components in answer_rewards:
        if components.keys() != names_in_answers:
            return None
    outcomes: list[Mapping[str, float]] = []
    for episode in played:
        outcomes.append({name: value for name, value in episode.outcome.items() if name not in names_in_answers})
    outcome_bounds = _bounds_of_sum(outcomes, role, attribution, declared=None, outcome=True)
    if outcome_bounds is None:
        return None
    failure = _failure_bound(goal)
    if failure is not None:
        outcome_bounds = _enclosing_bounds([outcome_bounds, (failure, failure)])

    # 3. The reward is the sum of both.
    lowest_answer, highest_answer = answer_bounds
    lowest_outcome, highest_outcome = outcome_bounds
    return lowest_answer + lowest_outcome, highest_answer + highest_outcome


def _failure_bound(goal: Goal) -> float | None:
    """The maximum outcome of a failed episode; None if outcomes or failed episodes do not count. "lowest" is at most 0,
    and at least the lowest outcome of the other episodes."""
    if goal.on_failure == "exclude" or not goal.attribution.outcome:
        return None
    return 0.0 if goal.on_failure == "lowest" else goal.on_failure


def _names(rewards: Sequence[Mapping[str, float]]) -> set[str]:
    """The names of all components."""
    return set().union(*rewards)


def _bounds_of_sum(
    rewards: Sequence[Mapping[str, float]],
    role: str,
    attribution: Attribution,
    declared: Bounds | None,
    *,
    outcome: bool,
) -> Bounds | None:
    """The lowest and highest value that a weighted sum of reward components can have; None if a component has unknown
    bounds.

    A component is taken to stay between 0 and 1, or within the bounds that the scorer `declared`. One recorded value
    outside disproves this. A component that some samples lack can also add 0.
    """
    low = high = 0.0
    for name in sorted(_names(rewards)):
        weight = weight_of(name, role, attribution, outcome=outcome)
        if weight == 0.0:
            continue
        values = [components[name] for components in rewards if name in components]
        lowest, highest = SHARE if declared is None else declared
        if not all(lowest <= value <= highest for value in values):
            return None
        ends = [weight * lowest, weight * highest]
        if len(values) < len(rewards):
            ends.append(0.0)  # a sample without the component
        low += min(ends)
        high += max(ends)
    return low, high


def _enclosing_bounds(bounds: Iterable[Bounds]) -> Bounds:
    """The narrowest bounds that contain all of these."""
    lows, highs = zip(*bounds, strict=True)
    return min(lows), max(highs)
