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
    """`group_signals`, with the reward of each sample by its policy's recipe, [n], NaN if it is not known."""
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


def with_step(known: Mapping[str, TaskFacts], collected: Collected, recipes: Recipes) -> dict[str, TaskFacts]:
    """The facts of the tasks after a step. Tasks that the step tried have a new mean reward, and the facts of each role
    pool the step's groups with the earlier facts at half weight."""
    rewards = attributed_each(collected, recipes)
    signals: dict[str, dict[str, list[GroupSignal]]] = {}
    for signal in _signals_of_rewards(collected, recipes, rewards):
        for role in sorted(signal.roles):
            signals.setdefault(signal.task, {}).setdefault(role, []).append(signal)
    after = dict(known)
    for task, mean in means_by_task(collected.samples, rewards).items():
        before = known[task].roles if task in known else {}
        now = signals.get(task, {})
        roles: dict[str, RoleFacts] = {}
        for role in sorted({*before, *now}):
            roles[role] = _pool_signals(before.get(role), now.get(role, ()))
        after[task] = TaskFacts(mean, roles)
    return after


def _pool_signals(before: RoleFacts | None, signals: Sequence[GroupSignal]) -> RoleFacts:
    old = RoleFacts(0.0, 0.0) if before is None else RoleFacts(before.rewards * HALF, before.variance)
    new = float(sum(signal.rewards for signal in signals))
    if not new:
        return old
    total = sum(signal.rewards * signal.variance for signal in signals)
    return RoleFacts(old.rewards + new, (old.rewards * old.variance + total) / (old.rewards + new))


def task_chances(
    places: Mapping[str, int], known: Mapping[str, TaskFacts], roles: Collection[str], floor: float
) -> Floats:
    """The chance of each task in a draw, [tasks]: tasks whose rewards are expected to vary are drawn more often.
    `places` has the index of each task in this array, and `known` the rewards so far.

    A share of `floor` is divided evenly among all tasks. The remainder is divided evenly among the roles, and the share
    of a role among the tasks in proportion to the expected variance of its groups: with rewards 0 and 1 that is p (1 -
    p). The expected variance is the mean of the task's variance and the average task's, which weighs as much as `PRIOR`
    rewards. A task that was never tried counts as the average task. If a role did not act in a task that was tried, its
    rewards on this task count as equal. A role without any variance so far gets no share.
    """
    tried_tasks = [name for name in known if name in places]
    shares: list[Floats] = []
    for role in sorted(roles):
        evidence = [_rewards_and_variance(known[name].roles, role) for name in tried_tasks]
        average = sum(variance for _, variance in evidence) / max(len(evidence), 1)
        if average <= 0.0:
            continue
        expected = np.full(len(places), average)
        for name, (count, variance) in zip(tried_tasks, evidence, strict=True):
            expected[places[name]] = (count * variance + PRIOR * average) / (count + PRIOR)
        shares.append(expected / expected.sum())
    even: Floats = np.full(len(places), 1.0 / len(places))
    if not shares:
        return even
    return np.asarray(floor * even + (1.0 - floor) * np.mean(shares, axis=0))


def _rewards_and_variance(roles: Mapping[str, RoleFacts], role: str) -> tuple[float, float]:
    """The number of rewards of a role on a task that was tried, and their variance."""
    if role in roles:
        return roles[role].rewards, roles[role].variance
    # It did not act on this task. Its rewards count as equal, and as many as the largest number of any role.
    return max((other.rewards for other in roles.values()), default=0.0), 0.0
