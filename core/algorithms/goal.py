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
        """The goal for one role.

        A role whose policy learns from a teacher has no rewards: it is judged by the rewards of the other roles, which
        is this whole goal.
        """
        if role in self.taught:
            return self
        goal_of_role = self
        for other_goal in self.others:
            if other_goal.roles is not None and role in other_goal.roles:
                goal_of_role = other_goal
                break
        # Only the first of several goals has the bounds (`goal_of_policies`).
        return msgspec.structs.replace(goal_of_role, roles=[role], others=(), taught=(), bounds=self.bounds)


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
    `failed` marks the failed episodes without an outcome. They have `floor`: the lowest reward of the finished
    episodes, or 0 if all are positive. `opposed` names trained roles whose rewards add up to the same number in
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
    taught: list[str] = []
    recipes_of_roles: list[tuple[Method, str]] = []
    for role, policy in players.items():
        recipe = recipes.of(policy)
        if recipe.takes_rewards:
            recipes_of_roles.append((recipe, role))
        else:
            taught.append(role)

    if not players:
        return goal_of(recipes.run, on_failure, roles=[])
    if not recipes_of_roles:  # all policies learn from teachers
        return Goal(method=_weighted_outcome(recipes.run), on_failure=failure_reward(on_failure))
    first, *others = [goal_of(recipe, on_failure, roles) for recipe, roles in by_equal(recipes_of_roles)]
    return msgspec.structs.replace(first, others=tuple(others), taught=tuple(taught), bounds=bounds)


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
    # `taught` are roles whose policies learn from a teacher: their rewards follow from the rewards of all other roles.
    if goal.taught:
        goal_of_other_roles = msgspec.structs.replace(goal, taught=())
        return _add_taught_roles(rewards_by_goal(played, goal_of_other_roles), goal.taught)
    # Roles whose policies have different recipes have different goals.
    if goal.others:
        first_goal = msgspec.structs.replace(goal, others=())
        goals = [first_goal, *goal.others]
        rewards_of_goals = [rewards_by_goal(played, one_goal) for one_goal in goals]
        return _combine_goals(played, goals, rewards_of_goals)
    return _rewards_by_method(played, goal)


def _rewards_by_method(played: Sequence[Played], goal: Goal) -> Worth:
    """The rewards of episodes and their roles if one method rewards all roles of the goal."""
    # 1. The rewards of each episode by role. The method needs all episodes at once, as the reward of a failed episode
    #    may depend on the others.
    samples: list[Sample] = []
    for run in played:
        counts_as_failed = run.episode.is_outcome and goal.on_failure != "exclude"
        if run.episode.status == "ok" or counts_as_failed:
            samples += _samples_of_episode(run, goal)
    step = goal.method.step(samples)
    rewards_of_episode = _rewards_by_role(step, goal)

    # 2. A failed episode without an answered call has no role. It gets the floor instead of a role's lowest reward.
    finished_rewards: list[dict[str, float]] = []
    for run in played:
        if run.episode.status == "ok" and run.episode.id in rewards_of_episode:
            finished_rewards.append(rewards_of_episode[run.episode.id])
    floor = _reward_floor(finished_rewards)
    failed_ids = _ids_without_outcome(step, goal, rewards_of_episode)
    for id in failed_ids:
        if NO_ROLE in rewards_of_episode[id]:
            rewards_of_episode[id] = {NO_ROLE: floor}

    # 3. Lists with an entry for each episode.
    by_role: list[dict[str, float]] = []
    mean_rewards: list[float | None] = []
    failed: list[bool] = []
    for run in played:
        rewards = rewards_of_episode.get(run.episode.id, {})
        by_role.append(rewards)
        mean_rewards.append(fmean(rewards.values()) if rewards else None)
        failed.append(run.episode.id in failed_ids)
    method_of_role = dict.fromkeys(_role_names(finished_rewards), goal.method)
    opposed = _opposed_roles(finished_rewards, method_of_role, _components(played))
    return Worth(reward=mean_rewards, by_role=by_role, failed=failed, floor=floor, opposed=opposed)


def _reward_floor(finished_rewards: Sequence[Mapping[str, float]]) -> float:
    """The reward of failed episodes under "lowest": the lowest mean reward of a finished episode, or 0 if all are
    positive.

    So a failure is never better than a finished episode, and never has a positive reward. `finished_rewards` has the
    rewards of each finished episode by role.
    """
    floor = 0.0
    for rewards in finished_rewards:
        floor = min(floor, fmean(rewards.values()))
    return floor


def _ids_without_outcome(step: Step, goal: Goal, rewards_of_episode: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Ids of the failed episodes that get the lowest reward of the finished ones, as no trained role has an outcome in
    them.

    Failed episodes whose reward is a configured number are not among them, as it does not depend on other episodes.
    `rewards_of_episode` has the rewards of each episode by trained role.
    """
    failed: set[str] = set()
    with_outcome: set[str] = set()
    outcome_missing = step.outcome_missing(later_turns=goal.method.to_go).tolist()
    for sample, is_missing in zip(step.samples, outcome_missing, strict=True):
        rewards = rewards_of_episode.get(sample.rollout, {})
        if rewards and sample.failure == "lowest":
            failed.add(sample.rollout)
        if not is_missing and sample.role in rewards:
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


def _combine_goals(played: Sequence[Played], goals: Sequence[Goal], rewards_of_goals: Sequence[Worth]) -> Worth:
    """Join the rewards of episodes whose roles have different goals. `rewards_of_goals` has, for each of `goals`, the
    rewards of the roles of this goal."""
    by_role: list[dict[str, float]] = []
    mean_rewards: list[float | None] = []
    failed: list[bool] = []
    finished_rewards: list[dict[str, float]] = []
    for i, run in enumerate(played):
        rewards: dict[str, float] = {}
        for worth in rewards_of_goals:
            rewards |= worth.by_role[i]
        # NO_ROLE stands for an episode without a call, so it does not count if a role has a reward.
        if len(rewards) > 1:
            rewards.pop(NO_ROLE, None)
        by_role.append(rewards)
        mean_rewards.append(fmean(rewards.values()) if rewards else None)
        failed.append(any(worth.failed[i] for worth in rewards_of_goals))
        if run.episode.status == "ok" and rewards:
            finished_rewards.append(rewards)

    opposed: tuple[str, ...] = ()
    for worth in rewards_of_goals:
        opposed += worth.opposed
    if not opposed:
        # The players of one game may have recipes that differ in a setting, and so different goals.
        method_of_role: dict[str, Method] = {}
        for goal in goals:
            method_of_role |= dict.fromkeys(goal.roles or (), goal.method)
        opposed = _opposed_roles(finished_rewards, method_of_role, _components(played))
    floor = _reward_floor(finished_rewards)
    return Worth(reward=mean_rewards, by_role=by_role, failed=failed, floor=floor, opposed=opposed)


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
    rewards_of_episodes: Sequence[Mapping[str, float]],
    method_of_role: Mapping[str, Method],
    components: Sequence[str],
) -> tuple[str, ...]:
    """The roles that play against each other, so that one role's gain is another's loss; empty if they do not.

    They weigh the components of the outcome differently, and their rewards add up to the same number in every episode.
    `rewards_of_episodes` are the rewards by role of the episodes that finished. A role without a method (`NO_ROLE`)
    is no player.
    """
    # Roles that weigh each component of the outcome alike do not play against each other.
    roles = _role_names(rewards_of_episodes)
    weights = set()
    for role in roles:
        method = method_of_role.get(role)
        if method is None or not method.attribution.outcome or method.joins_roles:
            return ()
        weights.add(tuple(weight_of(name, role, method.attribution, outcome=True) for name in components))
    if len(weights) < 2:
        return ()

    largest = max(abs(reward) for rewards in rewards_of_episodes for reward in rewards.values())
    rounding = 1e-9 * largest  # a difference up to this may come from rounding
    roles_differ = False
    sums: list[float] = []
    for rewards in rewards_of_episodes:
        sums.append(sum(rewards.values()))
        if max(rewards.values()) - min(rewards.values()) > rounding:
            roles_differ = True
    if not roles_differ:
        return ()

    # A sum of 0 in all episodes is enough. Another constant sum may be chance in a few episodes.
    always_zero = max(map(abs, sums)) <= rounding
    always_equal = max(sums) - min(sums) <= rounding
    if always_zero or (always_equal and len(sums) >= EPISODES_BEYOND_CHANCE):
        return tuple(roles)
    return ()
