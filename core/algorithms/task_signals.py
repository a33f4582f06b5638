"""Measure how much each task teaches, which is whether the rewards of its groups differ, and draw tasks accordingly."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.collect import Collected
from cotune.algorithms.filters import group_reasons
from cotune.algorithms.groups import build_groups
from cotune.algorithms.policy_recipes import Recipes, attributed_each
from cotune.algorithms.prepare import group_spread, means_by_task
from cotune.algorithms.samples import Floats, Sample

HALF = 0.5
"""A new try halves the weight of earlier tries, because the policies have changed since."""
PRIOR = 2.0
"""The average of all tasks weighs as much as this number of rewards of the task itself."""

EVEN_SHARE = 0.1
"""Share of an adaptive pool's draws in which all tasks have the same chance. Without it, a task whose first groups had
equal rewards might never be drawn again. The pool's gain was measured with this share."""


class GroupSignal(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a task: its roles, its episodes, the number of its rewards and their variance (population).

    `spread` says whether the group teaches something: its rewards differ, and no filter leaves the group out.
    """

    task: str
    roles: frozenset[str]
    episodes: frozenset[str]
    rewards: int
    variance: float
    spread: bool


class RoleFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a role on a task: its number of rewards, with less weight for older ones, and the mean variance of a
    group."""

    rewards: float
    variance: float


class TaskFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a task: its mean reward when it was last tried, and the facts of each role over all tries."""

    reward: float
    roles: dict[str, RoleFacts] = {}


def group_signals(collected: Collected, recipes: Recipes) -> list[GroupSignal]:
    """The groups of two or more rewards that the first term of each policy's recipe compares, in order of first
    appearance by recipe."""
    return _signals_of_rewards(collected, recipes, attributed_each(collected, recipes))


def _signals_of_rewards(collected: Collected, recipes: Recipes, rewards: Floats) -> list[GroupSignal]:
    """The signal of each group of two or more rewards, in order of first appearance by recipe.

    `rewards` are the rewards of the collected samples by the recipes of their policies, [n], NaN if unknown.
    """
    reward_of: dict[str, float] = {}
    usable: list[Sample] = []
    for sample, reward in zip(collected.samples, rewards.tolist(), strict=True):
        if not sample.continues and not math.isnan(reward):
            usable.append(sample)
            reward_of[sample.id] = reward

    signals: list[GroupSignal] = []
    for part, recipe, indices in recipes.split(usable):
        groups = build_groups([usable[i] for i in indices], recipe, part).groups
        rewards_of_groups = [np.array([reward_of[sample.id] for sample in group.samples]) for group in groups]
        stats = group_spread(groups, rewards_of_groups, recipe)
        reasons = group_reasons(groups, stats, recipe.filters, ())
        for i, group in enumerate(groups):
            flat = bool(stats.flat[i])
            signal = GroupSignal(
                task=group.samples[0].task,
                roles=frozenset(sample.role for sample in group.samples),
                episodes=frozenset(sample.rollout for sample in group.samples),
                rewards=len(group.samples),
                variance=0.0 if flat else float(stats.variance[i]),
                spread=reasons[i] is None and not flat,
            )
            signals.append(signal)
    return signals


def with_step(facts: Mapping[str, TaskFacts], collected: Collected, recipes: Recipes) -> dict[str, TaskFacts]:
    """Update the facts of tasks by the samples of a step. Returns new facts.

    A task that the step tried has a new mean reward, and the facts of each role pool the step's groups with the earlier
    facts at half weight. The facts of other tasks stay.
    """
    rewards = attributed_each(collected, recipes)
    signals_of_task: dict[str, dict[str, list[GroupSignal]]] = {}
    for signal in _signals_of_rewards(collected, recipes, rewards):
        for role in sorted(signal.roles):
            signals_of_task.setdefault(signal.task, {}).setdefault(role, []).append(signal)
    updated = dict(facts)
    for task, mean in means_by_task(collected.samples, rewards).items():
        facts_before = facts[task].roles if task in facts else {}
        signals_by_role = signals_of_task.get(task, {})
        roles: dict[str, RoleFacts] = {}
        for role in sorted({*facts_before, *signals_by_role}):
            roles[role] = _pool_signals(facts_before.get(role), signals_by_role.get(role, ()))
        updated[task] = TaskFacts(mean, roles)
    return updated


def _pool_signals(before: RoleFacts | None, signals: Sequence[GroupSignal]) -> RoleFacts:
    """The facts of a role on a task after a step: its earlier facts at half weight, with the groups of the step."""
    earlier_rewards = earlier_variance = 0.0
    if before is not None:
        earlier_rewards = before.rewards * HALF
        earlier_variance = before.variance
    new_rewards = float(sum(signal.rewards for signal in signals))
    if not new_rewards:
        return RoleFacts(earlier_rewards, earlier_variance)
    rewards = earlier_rewards + new_rewards
    weighted_variance = earlier_rewards * earlier_variance
    weighted_variance += sum(signal.rewards * signal.variance for signal in signals)
    return RoleFacts(rewards, weighted_variance / rewards)


def task_chances(
    index_of_task: Mapping[str, int], facts: Mapping[str, TaskFacts], roles: Collection[str], floor: float
) -> Floats:
    """The chance of each task in a draw, [tasks]: tasks whose rewards are expected to vary are drawn more often.

    `index_of_task` has the index of each task in the result, and `facts` the facts of the tasks that were tried.

    A share of `floor` is divided evenly among all tasks. The remainder is divided evenly among the roles, and the share
    of a role among the tasks in proportion to the expected variance of its groups: with rewards 0 and 1 that is p (1 -
    p). The expected variance is the mean of the task's variance and the average task's, which weighs as much as `PRIOR`
    rewards. A task that was never tried counts as the average task. If a role did not act in a task that was tried, its
    rewards on this task count as equal. A role without any variance so far gets no share.
    """
    n_tasks = len(index_of_task)
    shares_of_roles: list[Floats] = []
    for role in sorted(roles):
        facts_of_role = {task: _facts_of_role(facts[task], role) for task in facts if task in index_of_task}
        average = sum(of_task.variance for of_task in facts_of_role.values()) / max(len(facts_of_role), 1)
        if average <= 0.0:
            continue
        expected_variance = np.full(n_tasks, average)
        for task, of_task in facts_of_role.items():
            weighted_sum = of_task.rewards * of_task.variance + PRIOR * average
            expected_variance[index_of_task[task]] = weighted_sum / (of_task.rewards + PRIOR)
        shares_of_roles.append(expected_variance / expected_variance.sum())
    even: Floats = np.full(n_tasks, 1.0 / n_tasks)
    if not shares_of_roles:
        return even
    return np.asarray(floor * even + (1.0 - floor) * np.mean(shares_of_roles, axis=0))


def _facts_of_role(task: TaskFacts, role: str) -> RoleFacts:
    """The facts of a role on a task that was tried, also if the role did not act on it."""
    if role in task.roles:
        return task.roles[role]
    # Its rewards count as equal, and as many as the largest number of any role.
    most_rewards = max((facts.rewards for facts in task.roles.values()), default=0.0)
    return RoleFacts(most_rewards, 0.0)
