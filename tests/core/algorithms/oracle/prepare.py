"""From the samples of a step to the rows of an update: rewards, groups, filters, advantages.

samples [n]  ── attribute ──>  returns [terms][n]     a reward lacks or ties: left out
             ── build_groups ──>  groups, members [m]  alone in its group: left out
             ── group_reasons ──>  order [k]           places in `samples` of the members that stay
             ── advantages, shape ──>  values [k]      later calls of a branch join here
             ── sample_reason ──>  gone [k]            why each is left out, "" where it stays
             ── align ──>  rows                        places in [k], some of them twice
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from cotune.algorithms.samples import Bools, Codes, Floats, Sample, codes
from cotune.errors import GroupError
from cotune.records.structs import LARGEST_REWARD
from tests.core.algorithms.oracle.advantages import AdvantageState, advantages, shape
from tests.core.algorithms.oracle.attribution import attribute, lacking, overlong
from tests.core.algorithms.oracle.baselines import Spread, spread, units
from tests.core.algorithms.oracle.filters import align, group_reasons, high_entropy, sample_reason, tied
from tests.core.algorithms.oracle.groups import Group, build_groups, explain_alone, one_prompt
from tests.core.algorithms.oracle.recipes import Attribution, Recipe

Reached = Literal["no reward", "no comparison", "no signal", "filtered"]
"""Why a policy with samples has nothing to learn from, unless some are trained on: none has its reward, none has others
to be compared with, all that were compared are equal, or filters left out those that differ."""


class RoleStats(msgspec.Struct, frozen=True, kw_only=True):
    """One role in one step. Rewards are the recipe's mixed ones.

    `reward` is the mean over tasks of each task's mean over the samples that have one, kept or not: it does not move
    because some tasks get more samples than others, or were drawn with other chances (`task_weights`). `groups` counts
    groups of two or more, `group_spread` is the mean of their standard deviations (population), `zero_variance` the
    share whose rewards are all equal, both NaN without a group. `kept` counts the samples that are trained on.
    `truncated` is the share of all samples that were cut at their length limit, `overlong` of those that lose reward by
    their length.
    """

    samples: int
    kept: int
    reward: float
    groups: int
    group_spread: float
    zero_variance: float
    truncated: float = 0.0
    overlong: float = 0.0


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of an update with their advantages ([n], aligned), and what was left out.

    `trained` are those that the policies learn from, and `groups` hold these alone. The other samples have advantage 0:
    they count in the denominators of the loss and nowhere else, and are left out as `zero_advantage`.
    """

    samples: tuple[Sample, ...]
    advantages: Floats
    trained: tuple[Sample, ...]
    groups: tuple[Group, ...]
    left_out: Mapping[str, int]
    roles: Mapping[str, RoleStats]
    reward: float | None
    """Mean over tasks of the mean reward of all candidates that have one, kept or not; None without any."""
    rewarded: int = 0
    """How many have one."""
    reached: Mapping[str, Reached]
    """How far the samples of each policy came."""
    warnings: tuple[str, ...]
    state: AdvantageState


def prepare(
    samples: Sequence[Sample],
    recipe: Recipe,
    state: AdvantageState | None = None,
    *,
    consumed: Container[str] = (),
    decays: Container[str] = (),
    frozen: Collection[str] = (),
    others: Sequence[Sample] = (),
    part: str = "",
    task_weights: Mapping[str, float] | None = None,
) -> Prepared:
    """Attribute rewards, build groups, filter, compute advantages, filter again; count every sample that is left out.

    `consumed` holds the ids of groups that were trained on before, `others` the other answers in the episodes
    (`Collected.others`). A policy whose advantages are all zero has no signal: its samples are left out, unless the
    loss moves it all the same, or weight decay (policies in `decays`). Those of policies in `frozen` are compared as
    ever, and left out last. `task_weights` are those of the step's tasks in mean rewards, 0 for tasks that are not
    named; without them all tasks weigh the same. `part` names the samples where others of the step have another recipe:
    its groups and moving averages are not those of the others. Raises GroupError when candidates of different prompts
    meet in a group that must share one, and when more than half of the candidates of independent rollouts stand alone
    under a recipe that compares candidates of one prompt.
    """
    filters, every = recipe.filters, [*samples, *others]
    left_out: Counter[str] = Counter()

    # Rewards: one number per sample and term. A sample that lacks one, or that ties, is in no group.
    returns = [attribute(every, term.attribution, term.key)[: len(samples)] for term in recipe.terms]
    shown = _shown(samples, every, returns[0])
    for rewards in returns:
        _require_small(samples, rewards)
    if not recipe.takes_rewards:
        returns = [np.nan_to_num(values) for values in returns]
    complete = ~np.isnan(np.sum(returns, axis=0)) if samples else np.zeros(0, np.bool_)
    ties = complete & tied(samples, returns[0]) if filters.ties else np.zeros(len(samples), np.bool_)
    left_out.update(missing_reward=int((~complete).sum()), tie=int(ties.sum()))

    # Groups. Calls after the fork of a branch are in none; they join their branch's candidate below.
    usable = [sample for sample, stays in zip(samples, (complete & ~ties).tolist(), strict=True) if stays]
    continuing = [sample for sample in usable if sample.continues]
    built = build_groups([sample for sample in usable if not sample.continues], recipe, part)
    left_out.update(built.left_out)
    warnings = [
        *_missing(samples, complete),
        *(_lacking(every, recipe) if recipe.takes_rewards else ()),
        *_alone(recipe, left_out["group_of_one"], len(usable) - len(continuing)),
    ]
    place = {sample.id: i for i, sample in enumerate(samples)}
    members = [sample for group in built.groups for sample in group.samples]
    order = np.array([place[sample.id] for sample in members], np.int64)
    number = np.repeat(np.arange(len(built.groups)), [len(group.samples) for group in built.groups])

    # Filters of whole groups, before the advantages.
    stats = group_spread(members, returns[0][order], number, recipe, len(built.groups))
    reasons = group_reasons(built.groups, stats, filters, consumed)
    groups = [group for group, reason in zip(built.groups, reasons, strict=True) if reason is None]
    left_out.update(reasons[group] for group in number if reasons[group])
    order = order[np.array([reason is None for reason in reasons], np.bool_)[number]]

    # Advantages of the groups that stay; each later call of a branch has that of the candidate at its fork.
    kept = [samples[i] for i in order]
    values, state = advantages(kept, recipe.terms, state, [rewards[order] for rewards in returns], part)
    values = shape(kept, values, recipe.shaping)
    of_branch = {sample.rollout: value for sample, value in zip(kept, values.tolist(), strict=True)}
    joined = [sample for sample in continuing if sample.rollout in of_branch]
    left_out["continuation"] = len(continuing) - len(joined)
    kept += joined
    values = np.concatenate([values, [of_branch[sample.rollout] for sample in joined]])

    # Filters of samples: `gone` holds why each is left out, "" where it stays.
    gone = [sample_reason(s, value, filters) for s, value in zip(kept, values.tolist(), strict=True)]
    if filters.top_entropy is not None:
        high = [*high_entropy(groups, filters.top_entropy), *[True] * len(joined)]
        gone = [reason or ("" if stays else "low_entropy") for reason, stays in zip(gone, high, strict=True)]
    moved = recipe.loss.moves_alone
    if not moved:
        signal = {s.policy.name for s, value, why in zip(kept, values.tolist(), gone, strict=True) if value and not why}
        signal |= {s.policy.name for s in kept if s.policy.name in decays}
        gone = [why or ("" if s.policy.name in signal else "no_signal") for s, why in zip(kept, gone, strict=True)]
    if frozen:
        gone = [why or ("frozen_step" if s.policy.name in frozen else "") for s, why in zip(kept, gone, strict=True)]
    rows = [i for i, why in enumerate(gone) if not why]

    # Alignment takes some samples twice and leaves others out. A sample without an advantage teaches nothing.
    if filters.align_to is not None:
        aligned = [rows[i] for i in align([kept[i] for i in rows], filters.align_to)]
        for i in set(rows).difference(aligned):
            gone[i] = "beyond_alignment"
        rows = aligned
    teaches = (values != 0.0) | moved
    left_out.update(why or "zero_advantage" for why, does in zip(gone, teaches, strict=True) if why or not does)
    taught = {kept[i].id for i in rows if teaches[i]}
    trained = tuple(kept[i] for i in rows if teaches[i])
    trimmed = (msgspec.structs.replace(g, samples=tuple(s for s in g.samples if s.id in taught)) for g in groups)
    return Prepared(
        samples=tuple(kept[i] for i in rows),
        advantages=values[rows],
        trained=trained,
        groups=tuple(group for group in trimmed if group.samples),
        left_out={reason: count for reason, count in left_out.items() if count},
        roles=_role_stats(samples, shown, members, number, stats, trained, recipe.attribution, task_weights),
        reward=mean_over_tasks(_means_by_task(samples, shown, by_role=False).get("", {}), task_weights),
        rewarded=int((~np.isnan(shown)).sum()),
        reached=_reached(samples, complete, ties, members, stats.flat[number]),
        warnings=tuple(warnings),
        state=state,
    )


def _require_small(samples: Sequence[Sample], rewards: Floats) -> None:
    """Raise GroupError where a reward is beyond what training can hold."""
    for i in np.flatnonzero(np.abs(rewards) > LARGEST_REWARD)[:1]:
        sample = samples[i]
        named = ", ".join(f"{name} {value:g}" for name, value in {**sample.outcome, **sample.rewards}.items())
        raise GroupError(
            f"Role {sample.role!r} has a reward of {rewards[i]:g} on task {sample.task!r} ({named}, before weights), "
            "which the 32-bit numbers of training cannot hold.",
            f"Weighed, rewards must lie between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}: return smaller ones, or "
            "lower `weights`.",
        )


def _missing(samples: Sequence[Sample], complete: Bools) -> Iterable[str]:
    """Names the roles of which no sample has a usable reward: a matter of set-up, not of chance."""
    rewarded = {sample.role for sample, done in zip(samples, complete, strict=True) if done}
    for role in sorted({sample.role for sample in samples} - rewarded):
        own = sorted({name for s in samples if s.role == role for name in s.rewards})
        outcome = sorted({name for s in samples if s.role == role for name in s.outcome})
        yield (
            f"Role {role!r} has no reward that the recipe uses. Its candidates carry {own or 'none'}, its episodes "
            f"{outcome or 'none'}. Add a scorer for it, or name its components in `weights`."
        )


def _reached(
    samples: Sequence[Sample], complete: Bools, ties: Bools, members: Sequence[Sample], flat: Bools
) -> dict[str, Reached]:
    """How far the samples of each policy came; [n] `complete` and `ties` are of samples, `flat` of those in groups."""
    found: dict[str, Reached] = {sample.policy.name: "no reward" for sample in samples}
    found |= dict.fromkeys((samples[i].policy.name for i in np.flatnonzero(ties)), "filtered")
    found |= dict.fromkeys((samples[i].policy.name for i in np.flatnonzero(complete & ~ties)), "no comparison")
    found |= dict.fromkeys((sample.policy.name for sample in members), "no signal")
    found |= dict.fromkeys((members[i].policy.name for i in np.flatnonzero(~flat)), "filtered")
    return found


def _lacking(samples: Sequence[Sample], recipe: Recipe) -> Iterable[str]:
    """Names the components for lack of which samples are left out while others of their group carry them."""
    found = {pair for term in recipe.terms for pair in lacking(samples, term.attribution, term.key)}
    for role, name in sorted(found):
        yield (
            f"Candidates of role {role!r} are left out as missing_reward: they lack {name!r}, which others that they "
            "are compared with carry. If it is optional, set absent = 0 in [rewards]."
        )


def _alone(recipe: Recipe, alone: int, total: int) -> Iterable[str]:
    if not alone:
        return
    text = explain_alone(recipe, alone, total)
    if recipe.plan == "independent" and one_prompt(recipe) and alone > total / 2:
        raise GroupError(text)
    yield text


def group_spread(samples: Sequence[Sample], reward: Floats, number: Codes, recipe: Recipe, count: int) -> Spread:
    """Spread of the rewards [n] of samples in each of `count` groups; `number` [n] is the group of each."""
    return spread(units(samples, reward, number, recipe.terms[0].unit), count)


def _shown(samples: Sequence[Sample], every: Sequence[Sample], rewards: Floats) -> Floats:
    """`rewards` [n] as far as they are known: `lowest` says nothing of failures where no episode ended well."""
    if any(sample.failure is None for sample in every):
        return rewards
    unknown = np.array([s.failure == "lowest" and not (s.rewards or s.outcome) for s in samples], np.bool_)
    return np.where(unknown, np.nan, rewards)


def _role_stats(
    samples: Sequence[Sample],
    reward: Floats,
    members: Sequence[Sample],
    number: Codes,
    stats: Spread,
    trained: Sequence[Sample],
    attribution: Attribution,
    task_weights: Mapping[str, float] | None,
) -> dict[str, RoleStats]:
    """Statistics by role; a group that spans several roles counts for each of them."""
    role, names = codes([s.role for s in samples])
    totals = np.bincount(role, minlength=len(names))
    by_task = _means_by_task(samples, reward)
    kept = Counter(s.role for s in trained)
    cut = np.bincount(role, [s.truncated for s in samples], minlength=len(names))
    long = np.bincount(role, overlong(samples, attribution) > 0, minlength=len(names))
    deviation = np.sqrt(stats.variance)
    groups: dict[str, set[int]] = {}
    for sample, group in zip(members, number.tolist(), strict=True):
        if stats.size[group] > 1:
            groups.setdefault(sample.role, set()).add(group)
    result: dict[str, RoleStats] = {}
    for i, name in enumerate(names):
        own = sorted(groups.get(str(name), ()))
        mean = mean_over_tasks(by_task.get(str(name), {}), task_weights)
        result[str(name)] = RoleStats(
            samples=int(totals[i]),
            kept=kept[str(name)],
            reward=math.nan if mean is None else mean,
            groups=len(own),
            group_spread=float(deviation[own].mean()) if own else math.nan,
            zero_variance=float(stats.flat[own].mean()) if own else math.nan,
            truncated=float(cut[i] / totals[i]),
            overlong=float(long[i] / totals[i]),
        )
    return result


def _means_by_task(samples: Sequence[Sample], reward: Floats, *, by_role: bool = True) -> dict[str, dict[str, float]]:
    """By role, or under "" of all roles together, the mean reward of each task that has one."""
    place, pairs = codes([(s.role if by_role else "", s.task) for s in samples])
    having = np.bincount(place, ~np.isnan(reward), minlength=len(pairs))
    sums = np.bincount(place, np.nan_to_num(reward), minlength=len(pairs))
    found: dict[str, dict[str, float]] = {}
    for i, pair in enumerate(pairs):
        assert isinstance(pair, tuple)
        if having[i]:
            found.setdefault(pair[0], {})[pair[1]] = float(sums[i] / having[i])
    return found


def mean_over_tasks(means: Mapping[str, float], weights: Mapping[str, float] | None) -> float | None:
    """The weighted mean of these means of tasks; None if no task weighs anything."""
    weight = {task: 1.0 if weights is None else weights.get(task, 0.0) for task in means}
    total = sum(weight.values())
    return sum(weight[task] * mean for task, mean in means.items()) / total if total else None
