"""The measure of an evaluation: the reward that a run trains on, for single samples, including failed episodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import msgspec

from cotune.algorithms.attribution import weight_of
from cotune.algorithms.collect import failure_of
from cotune.algorithms.method import Method, Outcome
from cotune.algorithms.own import rewards_of
from cotune.algorithms.policy_recipes import Recipes, by_equal
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Sample
from cotune.algorithms.step import Step
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode, PolicyRef
from cotune.storage.outcomes import OnFailure, failure_reward

NO_ROLE = ""
"""Stands for the role of an episode without an answered call."""
EPISODES_BEYOND_CHANCE = 6
"""Minimum number of episodes with the same sum of rewards, other than 0, that does not count as chance."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The reward that counts, by default the plain sum of the outcome, and for which roles (None: all).

    `on_failure` is the reward of a failed episode, as in training; with `by_seat` only the role whose call ended last
    gets it. `others` are the goals of roles whose policies are trained on other rewards. `taught` are roles whose
    policies learn from a teacher instead of rewards: each has the reward that the episode has for the other roles.
    `bounds` are the bounds that scorers declare, by role.
    """

    method: Method = Outcome()
    on_failure: OnFailure = "lowest"
    roles: Collection[str] | None = None
    by_seat: bool = False
    others: tuple[Goal, ...] = ()
    taught: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = {}

    @property
    def attribution(self) -> Attribution:
        return self.method.attribution

    def of_role(self, role: str) -> Goal:
        """The goal of one role. A role whose policy learns from a teacher has no goal of its own: it has this one."""
        if role in self.taught:
            return self
        goal = self
        for other in self.others:
            if other.roles is not None and role in other.roles:
                goal = other
                break
        return msgspec.structs.replace(goal, roles=[role], others=(), taught=(), bounds=self.bounds)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of an evaluation: the components of its outcome, and its answered calls (`single_sample`)."""

    episode: Episode
    outcome: Mapping[str, float]
    samples: Sequence[Sample] = ()
    timed_out: Collection[str] = ()
    """Roles with a call that timed out."""
    last: str = NO_ROLE
    """The role whose call ended last, answered or not."""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of some episodes. The lists have one entry for each episode, in their order.

    `by_role` has the reward of each trained role, and `reward` is their mean; None for an episode without rewards.
    `failed` marks the failed episodes without an outcome. They have `floor`, the lowest reward of the
    episodes that ended well, but at most 0. `opposed` names trained roles whose rewards add up to the same number in
    every episode: one role's gain is another's loss, so their mean says nothing.
    """

    reward: list[float | None]
    by_role: list[dict[str, float]]
    failed: list[bool]
    floor: float
    opposed: tuple[str, ...] = ()


def goal_of(recipe: Method | None, on_failure: str, roles: Collection[str] | None = None) -> Goal:
    """The goal of a run with this recipe.

    It is the plain sum of the outcome without a recipe, and the outcome by the recipe's weights if the recipe learns
    from a teacher.
    """
    failed = failure_reward(on_failure)
    if recipe is None:
        return Goal(on_failure=failed)
    if not recipe.takes_rewards:
        return Goal(method=_weighted_outcome(recipe), on_failure=failed)
    return Goal(method=recipe, on_failure=failed, roles=roles, by_seat=recipe.by_seat)


def _weighted_outcome(recipe: Method) -> Method:
    """The outcome of whole episodes by a recipe's weights."""
    how = recipe.attribution
    outcome = Attribution(own=False, outcome=True, weights=how.weights, other=how.other, team_weight=how.team_weight)
    return Outcome().replaced(attribution=outcome)


def goal_of_policies(
    recipes: Recipes, on_failure: str, players: Mapping[str, str], bounds: Mapping[str, tuple[float, float]] = {}
) -> Goal:
    """The goal that compares checkpoints if each policy may have its own recipe.

    `players` are the trained roles with the policies that play them, and `bounds` the bounds that scorers declare, by
    role. Each role is judged by the rewards that its policy is trained on. A role whose policy learns from a teacher
    has no rewards, so it is judged by the rewards of the other roles. If all policies learn from teachers, the goal is
    the outcome, by the run's weights.
    """
    taught = tuple(role for role, policy in players.items() if not recipes.of(policy).takes_rewards)
    roles_of_recipes = by_equal((recipes.of(policy), role) for role, policy in players.items() if role not in taught)
    if not roles_of_recipes and taught:
        return Goal(method=_weighted_outcome(recipes.run), on_failure=failure_reward(on_failure))
    if not roles_of_recipes:
        return goal_of(recipes.run, on_failure, [])
    goals = [goal_of(recipe, on_failure, roles) for recipe, roles in roles_of_recipes]
    return msgspec.structs.replace(goals[0], others=tuple(goals[1:]), taught=taught, bounds=bounds)


def single_sample(call: CallRecord, rewards: Mapping[str, float]) -> Sample:
    """The chosen answer of a call as a sample, whoever gave it. `rewards_by_goal` adds the task and the outcome."""
    assert call.chosen is not None
    candidate = call.candidates[call.chosen]
    return Sample(
        id=candidate_id(call.id, call.chosen),
        task="",
        rollout=call.episode,
        role=call.role,
        turn=call.turn,
        step=call.step,
        branch=call.id,
        prompt=call.id,
        policy=call.policy or PolicyRef(call.model),
        tokens=len(candidate.token_ids) or call.usage.completion_tokens,
        rewards=rewards,
        limit=call.sampling.get("max_tokens"),
        truncated=candidate.finish_reason == "length",
    )


def rewards_by_goal(played: Sequence[Played], goal: Goal) -> Worth:
    """The rewards of episodes and their roles under a goal.

    Episodes that the infrastructure failed, that were cancelled, or that failed under `on_failure = "exclude"` have no
    reward. A role's reward in an episode is the mean over its calls, or the return of its first call if the recipe sums
    rewards up to the end.
    """
    if goal.taught:
        of_other_roles = rewards_by_goal(played, msgspec.structs.replace(goal, taught=()))
        return _add_taught_roles(of_other_roles, goal.taught)
    if goal.others:
        goals = [msgspec.structs.replace(goal, others=()), *goal.others]
        return _combine_goals(played, goals, [rewards_by_goal(played, part) for part in goals])
    return _rewards_by_method(played, goal)


def _rewards_by_method(played: Sequence[Played], goal: Goal) -> Worth:
    """The rewards of episodes and their roles if one method rewards all roles of the goal."""
    samples: list[Sample] = []
    for run in played:
        counts_as_failed = run.episode.is_outcome and goal.on_failure != "exclude"
        if run.episode.status == "ok" or counts_as_failed:
            samples += _samples_of_episode(run, goal)
    step = goal.method.step(samples)
    rewards = _rewards_by_role(step, goal)

    # A failed episode never has a higher reward than the worst episode that finished.
    finished_rewards: list[dict[str, float]] = []
    for run in played:
        if run.episode.status == "ok" and run.episode.id in rewards:
            finished_rewards.append(rewards[run.episode.id])
    floor = _floor(finished_rewards)

    # A failed episode without an answered call has no role: it gets the floor of the episodes that finished.
    failed = _failed_episodes(step, goal, rewards)
    for id in failed:
        if NO_ROLE in rewards[id]:
            rewards[id] = {NO_ROLE: floor}

    ids = [run.episode.id for run in played]
    methods = dict.fromkeys(_role_names(finished_rewards), goal.method)
    return Worth(
        reward=[fmean(rewards[id].values()) if id in rewards else None for id in ids],
        by_role=[rewards.get(id, {}) for id in ids],
        failed=[id in failed for id in ids],
        floor=floor,
        opposed=_opposed_roles(finished_rewards, methods, _components(played)),
    )


def _floor(finished_rewards: Sequence[Mapping[str, float]]) -> float:
    """The lowest mean reward of finished episodes, but at most 0. The rewards of each episode are by role."""
    return min([0.0, *(fmean(by_role.values()) for by_role in finished_rewards)])


def _failed_episodes(step: Step, goal: Goal, rewards: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Ids of the episodes whose reward replaces an outcome: no role that counts has an outcome in them.

    `rewards` has the reward of each role that counts, by episode. Only with "lowest" does a failed episode get a reward
    that depends on other episodes; an episode with a configured reward is not among the result.
    """
    failed: set[str] = set()
    with_outcome: set[str] = set()
    outcome_missing = step.outcome_missing(later_turns=goal.method.to_go).tolist()
    for sample, missing in zip(step.samples, outcome_missing, strict=True):
        by_role = rewards.get(sample.rollout, {})
        if by_role and sample.failure == "lowest":
            failed.add(sample.rollout)
        if not missing and sample.role in by_role:
            with_outcome.add(sample.rollout)
    return failed - with_outcome


def _add_taught_roles(of_others: Worth, taught: Collection[str]) -> Worth:
    """The worth of episodes with rewards for the taught roles, whose policies learn from a teacher instead of rewards.

    Each taught role gets the mean reward of the other roles, so the mean of the episode does not change.
    """
    by_role: list[dict[str, float]] = []
    for rewards, mean in zip(of_others.by_role, of_others.reward, strict=True):
        if mean is None:  # an episode without rewards
            by_role.append(rewards)
        else:
            by_role.append({**rewards, **dict.fromkeys(taught, mean)})
    return msgspec.structs.replace(of_others, by_role=by_role)


def _combine_goals(played: Sequence[Played], goals: Sequence[Goal], parts: Sequence[Worth]) -> Worth:
    """The worth (the rewards) of episodes whose roles have different goals. `parts` has the worth for each of
    `goals`."""
    by_role: list[dict[str, float]] = []
    failed: list[bool] = []
    finished_rewards: list[dict[str, float]] = []
    for i, run in enumerate(played):
        rewards: dict[str, float] = {}
        for part in parts:
            rewards |= part.by_role[i]
        # NO_ROLE stands for an episode without a call, so it does not count if a role has a reward.
        if len(rewards) > 1:
            rewards.pop(NO_ROLE, None)
        by_role.append(rewards)
        failed.append(any(part.failed[i] for part in parts))
        if run.episode.status == "ok" and rewards:
            finished_rewards.append(rewards)

    opposed: tuple[str, ...] = ()
    for part in parts:
        opposed += part.opposed
    if not opposed:  # players of one game may differ in a setting of their recipe, and so be in different parts
        methods: dict[str, Method] = {}
        for goal in goals:
            methods |= dict.fromkeys(goal.roles or (), goal.method)
        opposed = _opposed_roles(finished_rewards, methods, _components(played))
    return Worth(
        reward=[fmean(rewards.values()) if rewards else None for rewards in by_role],
        by_role=by_role,
        failed=failed,
        floor=_floor(finished_rewards),
        opposed=opposed,
    )


def _rewards_by_role(step: Step, goal: Goal) -> dict[str, dict[str, float]]:
    """The reward of each role that counts, by episode: the mean reward of its calls, or the return of its first call if
    the method sums rewards up to the end."""
    # The (turn, reward) of each call, by episode and role.
    calls: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for sample, reward in zip(step.samples, rewards_of(goal.method, step).tolist(), strict=True):
        role_counts = goal.roles is None or sample.role in goal.roles or sample.role == NO_ROLE
        if role_counts and math.isfinite(reward):
            calls[sample.rollout, sample.role].append((sample.turn, reward))

    rewards: dict[str, dict[str, float]] = {}
    for (episode, role), turns_and_rewards in calls.items():
        if goal.method.to_go:
            _, role_reward = min(turns_and_rewards)
        else:
            role_reward = fmean(reward for _, reward in turns_and_rewards)
        rewards.setdefault(episode, {})[role] = role_reward
    return rewards


def _samples_of_episode(played: Played, goal: Goal) -> list[Sample]:
    """The samples of an episode, completed by its task, outcome and failure.

    An episode without an answered call has one sample, which stands for its outcome.
    """
    episode = played.episode
    samples = played.samples
    culprit = NO_ROLE
    if goal.by_seat and episode.status != "ok" and played.last != NO_ROLE:
        # In a game, a failure is the failure of the role that called last. The other roles have no reward.
        culprit = played.last
        samples = [sample for sample in samples if sample.role == culprit]
    if not samples:
        stand_in = Sample(
            id=candidate_id(episode.id, 0),
            task="",
            rollout=episode.id,
            role=culprit,
            turn=0,
            step=0,
            branch=episode.id,
            prompt=episode.id,
            policy=PolicyRef(culprit),
            tokens=0,
        )
        samples = [stand_in]
    timed_out = any(goal.roles is None or role in goal.roles for role in played.timed_out)
    failure = failure_of(episode, goal.on_failure)
    completed: list[Sample] = []
    for sample in samples:
        completed.append(
            msgspec.structs.replace(
                sample, task=episode.task.id, outcome=played.outcome, failure=failure, timed_out=timed_out
            )
        )
    return completed


def _role_names(rewards_of_episodes: Sequence[Mapping[str, float]]) -> list[str]:
    """The roles that have a reward in any of the episodes."""
    return sorted(set().union(*rewards_of_episodes))


def _components(played: Sequence[Played]) -> list[str]:
    """The names of the components that the outcome of any episode has."""
    return sorted(set().union(*(run.outcome for run in played)))


def _opposed_roles(
    rewards_of_episodes: Sequence[Mapping[str, float]], methods: Mapping[str, Method], components: Sequence[str]
) -> tuple[str, ...]:
    """The roles whose rewards always add up to the same number, although each weighs the outcome differently.

    `rewards_of_episodes` are the rewards by role of the episodes that finished. `methods` are the methods of the roles.
    If a role has none (`NO_ROLE`), no roles are opposed.
    """
    # Roles that weigh each component of the outcome alike do not play against each other.
    roles = _role_names(rewards_of_episodes)
    weights = set()
    for role in roles:
        method = methods.get(role)
        if method is None or not method.attribution.outcome or method.joins_roles:
            return ()
        weights.add(tuple(weight_of(name, role, method.attribution, outcome=True) for name in components))
    if len(weights) < 2:
        return ()

    # The roles must differ in some episode, and the sum over all roles must never change. A sum of 0 is enough; another
    # constant sum may be chance in a few episodes.
    totals = [sum(by_role.values()) for by_role in rewards_of_episodes]
    largest = max(abs(reward) for by_role in rewards_of_episodes for reward in by_role.values())
    rounding = 1e-9 * largest
    roles_differ = any(max(by_role.values()) - min(by_role.values()) > rounding for by_role in rewards_of_episodes)
    sum_is_zero = max(map(abs, totals)) <= rounding
    sum_is_constant = len(rewards_of_episodes) >= EPISODES_BEYOND_CHANCE and max(totals) - min(totals) <= rounding
    if roles_differ and (sum_is_zero or sum_is_constant):
        return tuple(roles)
    return ()
