"""What the groups of each task show: whether their rewards differ, and so how often the task is worth drawing again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.collect import Collected
from cotune.algorithms.filters import group_reasons
from cotune.algorithms.groups import build_groups
from cotune.algorithms.policy_recipes import Recipes, attributed_each
from cotune.algorithms.prepare import group_spread
from cotune.algorithms.samples import Floats, codes

HALF = 0.5
"""What a try leaves of the weight of those before it, as the policies have changed since."""
PRIOR = 2.0
"""Rewards that the average of all tasks counts as, beside those that a task has shown."""

EVEN_SHARE = 0.1
"""Share of an adaptive pool's draws that takes all tasks alike. Without it, a task whose first groups had equal rewards
might never be tried again. The pool's gain was measured with this share."""


class GroupSignal(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a task: its roles, its episodes, the rewards that it has and their variance (population).

    `spread`: whether the group teaches something: its rewards differ, and no filter of groups leaves it out.
    """

    task: str
    roles: frozenset[str]
    episodes: frozenset[str]
    rewards: int
    variance: float
    spread: bool


class RoleFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a role has shown on a task: how many rewards, older ones weighing less, and the mean variance of a group."""

    rewards: float
    variance: float


class TaskFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a run knows of a task: its mean reward when it was last tried, and each role's facts over all tries."""

    reward: float
    roles: dict[str, RoleFacts] = {}


def group_signals(collected: Collected, recipes: Recipes) -> list[GroupSignal]:
    """The groups of two or more rewards that the first term of each policy's recipe compares, in order of first
    appearance by recipe."""
    return _signals(collected, recipes, attributed_each(collected, recipes))


def _signals(collected: Collected, recipes: Recipes, reward: Floats) -> list[GroupSignal]:
    """`group_signals`; `reward` is what each sample has by its policy's recipe, [n]."""
    reward_of = {s.id: r for s, r in zip(collected.samples, reward.tolist(), strict=True)}
    usable = [s for s in collected.samples if not s.continues and reward_of[s.id] == reward_of[s.id]]
    found: list[GroupSignal] = []
    for part, recipe, places in recipes.split(usable):
        groups = build_groups([usable[i] for i in places], recipe, part).groups
        members = [sample for group in groups for sample in group.samples]
        number = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
        stats = group_spread(members, np.array([reward_of[s.id] for s in members]), number, recipe, len(groups))
        reasons = group_reasons(groups, stats, recipe.filters, ())
        found += [
            GroupSignal(
                task=group.samples[0].task,
                roles=frozenset(s.role for s in group.samples),
                episodes=frozenset(s.rollout for s in group.samples),
                rewards=len(group.samples),
                variance=0.0 if stats.flat[i] else float(stats.variance[i]),
                spread=reasons[i] is None and not stats.flat[i],
            )
            for i, group in enumerate(groups)
        ]
    return found


def _task_rewards(collected: Collected, reward: Floats) -> dict[str, float]:
    """Mean reward of each task's samples; tasks without one are left out."""
    task, names = codes([sample.task for sample in collected.samples])
    having = ~np.isnan(reward)
    counts = np.bincount(task, having, minlength=len(names))
    sums = np.bincount(task, np.nan_to_num(reward), minlength=len(names))
    return {str(name): float(sums[i] / counts[i]) for i, name in enumerate(names) if counts[i]}


def with_step(known: Mapping[str, TaskFacts], collected: Collected, recipes: Recipes) -> dict[str, TaskFacts]:
    """What is known of the tasks after a step: those that it tried have a new mean reward, and for each role the
    rewards of its groups, pooled with what was known before at half its weight."""
    reward = attributed_each(collected, recipes)
    shown: dict[str, dict[str, list[GroupSignal]]] = {}
    for signal in _signals(collected, recipes, reward):
        for role in sorted(signal.roles):
            shown.setdefault(signal.task, {}).setdefault(role, []).append(signal)
    after = dict(known)
    for task, mean in _task_rewards(collected, reward).items():
        before, now = known[task].roles if task in known else {}, shown.get(task, {})
        pooled = {role: _pooled(before.get(role), now.get(role, ())) for role in sorted({*before, *now})}
        after[task] = TaskFacts(mean, pooled)
    return after


def _pooled(before: RoleFacts | None, signals: Sequence[GroupSignal]) -> RoleFacts:
    old = RoleFacts(0.0, 0.0) if before is None else RoleFacts(before.rewards * HALF, before.variance)
    new = float(sum(signal.rewards for signal in signals))
    if not new:
        return old
    total = sum(signal.rewards * signal.variance for signal in signals)
    return RoleFacts(old.rewards + new, (old.rewards * old.variance + total) / (old.rewards + new))


def chances(places: Mapping[str, int], known: Mapping[str, TaskFacts], roles: Collection[str], floor: float) -> Floats:
    """[tasks] the chance of each in a draw, at its place.

    `floor` is spread evenly over all tasks, the rest evenly over the roles, and what a role has over the tasks by the
    variance that its groups are expected to have there. That is the mean of what a task has shown and of the average
    task, which weighs as much as `PRIOR` rewards; a task that was never tried counts as the average one. The variance
    of a group of rewards 0 and 1 is p (1 - p). Where a role did not act in a task that was tried, its rewards count as
    equal. A role that has never shown a variance has no share.
    """
    tried = [(places[name], facts.roles) for name, facts in known.items() if name in places]
    index = np.array([place for place, _ in tried], np.int64)
    shares = []
    for role in sorted(roles):
        shown = [_shown(of, role) for _, of in tried]
        average = sum(variance for _, variance in shown) / max(len(shown), 1)
        if average > 0.0:
            expected = np.full(len(places), average)
            expected[index] = [(n * variance + PRIOR * average) / (n + PRIOR) for n, variance in shown]
            shares.append(expected / expected.sum())
    even = np.full(len(places), 1.0 / len(places))
    return np.asarray(floor * even + (1.0 - floor) * np.mean(shares, axis=0)) if shares else even


def _shown(roles: Mapping[str, RoleFacts], role: str) -> tuple[float, float]:
    """How many rewards a role has had on a task that was tried, and their variance."""
    if (own := roles.get(role)) is not None:
        return own.rewards, own.variance
    return max((other.rewards for other in roles.values()), default=0.0), 0.0
