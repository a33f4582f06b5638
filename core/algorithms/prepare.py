"""Turn the samples of a step into the rows of an update: rewards, groups, filters, advantages.

samples [n]  ── rewards ──>         rewards [n]           without a reward: left out
             ── build_groups ──>    groups of samples     alone in its group: left out
             ── group_reasons ──>   compared groups       equal rewards, trained on before, ...: left out
             ── advantages ──>      weighed samples       later calls of a branch join here
             ── filter_samples ──>  weighed samples       each with the reason to leave it out, or none
             ── align ──>           rows                  some of them twice
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from cotune.algorithms.attribution import overlong_penalties
from cotune.algorithms.collect import Collected, temperature
from cotune.algorithms.comparing import Spread, spread, units
from cotune.algorithms.filters import align_call_counts, group_reasons, low_entropy, sample_reason, tied
from cotune.algorithms.groups import Group, build_groups, explain_alone, one_prompt
from cotune.algorithms.method import Method
from cotune.algorithms.own import advantages_of, rewards_of
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Bools, Codes, Floats, Sample, TrainRow
from cotune.algorithms.step import AdvantageState, Step
from cotune.errors import GroupError
from cotune.records.structs import LARGEST_REWARD
from cotune.storage.protocol import Store

Reached = Literal["no reward", "no comparison", "no signal", "filtered"]
"""The last stage that samples of a policy reached, which explains why none is trained on: none has its reward, none has
others to be compared with, all compared ones are equal, or filters left out the ones that differ."""


class RoleStats(msgspec.Struct, frozen=True, kw_only=True):
    """One role in one step. Rewards are weighted by the recipe.

    `reward` is the mean over tasks of each task's mean over the samples with a reward, kept or not. It does not change
    if some tasks get more samples than others, or are drawn with other chances (`task_weights`). `groups` counts groups
    of two or more, `group_spread` is the mean of their standard deviations (population), `zero_variance` the share
    whose rewards are all equal, both NaN without a group. `kept` counts the samples that are trained on. `truncated` is
    the share of samples that were cut at their length limit, `overlong` the share of samples with a penalty for their
    length.
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
    """The samples of an update with their advantages ([n], in the same order), and the number of samples left out.

    `trained` are the samples that the policies learn from, and `groups` have only these. The other samples have
    advantage 0: they count only in the denominators of the loss, and are left out as `zero_advantage`.
    """

    samples: tuple[Sample, ...]
    advantages: Floats
    trained: tuple[Sample, ...]
    groups: tuple[Group, ...]
    left_out: Mapping[str, int]
    roles: Mapping[str, RoleStats]
    reward: float | None
    """Mean over tasks of the mean reward of all candidates with a reward, kept or not; None without any."""
    rewarded: int = 0
    """Number of candidates with a reward."""
    reached: Mapping[str, Reached]
    """The last stage that samples of each policy reached."""
    warnings: tuple[str, ...]
    state: AdvantageState


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the run that `prepare` needs besides the samples, the same for all policies of a step."""

    consumed: Container[str] = ()
    """Ids of groups that were trained on before."""
    frozen: Collection[str] = ()
    """Policies that are compared but not trained in this step."""
    task_weights: Mapping[str, float] | None = None
    """Weight of each task in mean rewards, 0 for tasks that are not named; None if all tasks weigh the same."""


def prepare(
    samples: Sequence[Sample],
    recipe: Method,
    state: AdvantageState | None = None,
    *,
    context: StepContext | None = None,
    others: Sequence[Sample] = (),
    part: str = "",
) -> Prepared:
    """Compute the rewards and advantages of samples by a recipe, and leave out the samples that are not trained on.

    Every sample that is left out is counted by reason. `others` are the other answers in the episodes
    (`Collected.others`). A policy whose advantages are all zero has no signal: its samples are left out, unless the
    loss moves the policy anyway. If policies of the step have different recipes, `part` names the samples of this
    recipe (`Recipes.split`); each part has its own groups and moving averages.

    Raises GroupError if a group that must share one prompt has candidates of different prompts, and if more than half
    of the candidates of independent rollouts are alone under a recipe that compares candidates of one prompt.
    """
    context = context or StepContext()
    left_out: Counter[str] = Counter()

    # 1. One reward for each sample. A sample without one, or whose roles tie, is in no group.
    step = recipe.step([*samples, *others], state, part)
    rewards = _compute_rewards(samples, step, recipe)
    left_out.update(missing_reward=int((~rewards.has_reward).sum()), tie=int(rewards.ties.sum()))

    # 2. Groups. Calls after the fork of a branch have no group; stage 4 gives them an advantage.
    usable = [samples[i] for i in np.flatnonzero(rewards.has_reward & ~rewards.ties)]
    continuing = [sample for sample in usable if sample.continues]
    built = build_groups([sample for sample in usable if not sample.continues], recipe, part)
    left_out.update(built.left_out)
    warnings = list(_missing_reward_warnings(samples, rewards.has_reward, step.lacking if recipe.takes_rewards else ()))
    warnings += _lone_candidates_warning(recipe, left_out["group_of_one"], len(usable) - len(continuing))

    # 3. Whole groups are filtered before the advantages are computed.
    compared = _filter_groups(built.groups, samples, rewards.of_samples, recipe, context.consumed)
    left_out.update(compared.left_out)

    # 4. Advantages of the remaining groups. Each later call of a branch has the advantage of the candidate at its fork.
    step.groups = compared.indices
    advantages = advantages_of(recipe, step, rewards.with_others).tolist()
    weighed = [_Weighed(samples[i], advantages[i]) for indices in compared.indices for i in indices]
    advantage_of_branch = {row.sample.rollout: row.advantage for row in weighed}
    for sample in continuing:
        if sample.rollout in advantage_of_branch:
            weighed.append(_Weighed(sample, advantage_of_branch[sample.rollout]))
        else:
            left_out["continuation"] += 1

    # 5. Single samples are filtered by their advantages. Alignment leaves some out and repeats others.
    _filter_samples(weighed, compared.groups, recipe, context)
    rows = [row for row in weighed if not row.reason]
    if recipe.filters.align_to is not None:
        rows = _align_rows(rows, recipe.filters.align_to)

    # 6. A sample without an advantage teaches nothing: it counts only in the denominators of the loss.
    moves_alone = recipe.loss.moves_alone
    for row in weighed:
        if row.reason:
            left_out[row.reason] += 1
        elif not row.advantage and not moves_alone:
            left_out["zero_advantage"] += 1
    trained = tuple(row.sample for row in rows if row.advantage or moves_alone)
    return Prepared(
        samples=tuple(row.sample for row in rows),
        advantages=np.array([row.advantage for row in rows], np.float64),
        trained=trained,
        groups=_trim_groups(compared.groups, trained),
        left_out={reason: count for reason, count in left_out.items() if count},
        roles=_role_stats(
            samples,
            rewards.shown,
            built.groups,
            compared.stats,
            trained=trained,
            attribution=recipe.attribution,
            task_weights=context.task_weights,
        ),
        reward=mean_over_tasks(means_by_task(samples, rewards.shown), context.task_weights),
        rewarded=int((~np.isnan(rewards.shown)).sum()),
        reached=_last_stages(samples, rewards.has_reward, rewards.ties, built.groups, compared.stats.flat),
        warnings=tuple(warnings),
        state=step.state,
    )


class _Rewards(NamedTuple):
    """The rewards of the n samples of a step by a recipe."""

    with_others: Floats
    """[n + others] the rewards of the samples, then of the other answers in their episodes."""
    of_samples: Floats
    """[n]"""
    shown: Floats
    """[n] the rewards that figures show: NaN if a sample has no real reward."""
    has_reward: Bools
    """[n] whether the sample has its reward, or needs none."""
    ties: Bools
    """[n] whether the sample is left out by `Filters.ties`: all roles of its episode have the same reward."""


def _compute_rewards(samples: Sequence[Sample], step: Step, recipe: Method) -> _Rewards:
    """The rewards of `samples`, the first n samples of the step; other answers of their episodes follow in the step.

    Raises GroupError if a reward is too large for training.
    """
    n = len(samples)
    rewards_with_others = rewards_of(recipe, step)
    rewards = rewards_with_others[:n]
    shown = _rewards_to_show(samples, step.samples, rewards)
    _require_small(samples, rewards)
    has_reward = ~(np.isnan(rewards) | step.unknown[:n])
    if not recipe.takes_rewards:
        # A teacher, or the policy itself, scores these samples: a missing reward is no reason to leave one out.
        rewards_with_others = np.nan_to_num(rewards_with_others)
        rewards = rewards_with_others[:n]
        has_reward = np.ones(n, np.bool_)
    ties = np.zeros(n, np.bool_)
    if recipe.filters.ties:
        ties = has_reward & tied(samples, rewards)
    return _Rewards(rewards_with_others, of_samples=rewards, shown=shown, has_reward=has_reward, ties=ties)


class _ComparedGroups(NamedTuple):
    """The groups that are compared, and the samples of all other groups by the reason to leave them out."""

    groups: Sequence[Group]
    indices: Sequence[Codes]
    """The indices of the samples of each compared group."""
    left_out: Counter[str]
    stats: Spread
    """Statistics of the rewards of all groups, compared or not."""


def _filter_groups(
    groups: Sequence[Group], samples: Sequence[Sample], rewards: Floats, recipe: Method, consumed: Container[str]
) -> _ComparedGroups:
    """Leave out whole groups, for example if all of their rewards are equal. `rewards` are by sample, [n]."""
    index_of = {sample.id: i for i, sample in enumerate(samples)}
    indices_of_groups: list[Codes] = []
    for group in groups:
        indices_of_groups.append(np.array([index_of[sample.id] for sample in group.samples], np.int64))
    stats = group_spread(groups, [rewards[indices] for indices in indices_of_groups], recipe)
    reasons = group_reasons(groups, stats, recipe.filters, consumed)

    compared: list[Group] = []
    compared_indices: list[Codes] = []
    left_out: Counter[str] = Counter()
    for group, indices, reason in zip(groups, indices_of_groups, reasons, strict=True):
        if reason is None:
            compared.append(group)
            compared_indices.append(indices)
        else:
            left_out[reason] += len(group.samples)
    return _ComparedGroups(compared, compared_indices, left_out, stats)


@dataclass(slots=True)
class _Weighed:
    """A sample that was compared."""

    sample: Sample
    advantage: float
    reason: str = ""
    """Why it is left out of training; empty if it stays."""


def _filter_samples(weighed: Sequence[_Weighed], groups: Sequence[Group], recipe: Method, context: StepContext) -> None:
    """Set `reason` of the samples to leave out, each to the first reason. `groups` are the groups that are compared."""
    for row in weighed:
        row.reason = sample_reason(row.sample, row.advantage, recipe.filters)
    if recipe.filters.top_entropy is not None:
        low = low_entropy(groups, recipe.filters.top_entropy)
        for row in weighed:
            if not row.reason and row.sample.id in low:
                row.reason = "low_entropy"

    # A policy without an advantage in the whole step does not change, unless its loss changes it anyway.
    if not recipe.loss.moves_alone:
        changing = {row.sample.policy.name for row in weighed if row.advantage and not row.reason}
        for row in weighed:
            if not row.reason and row.sample.policy.name not in changing:
                row.reason = "no_signal"
    for row in weighed:
        if not row.reason and row.sample.policy.name in context.frozen:
            row.reason = "frozen_step"


def _align_rows(rows: Sequence[_Weighed], most: int) -> list[_Weighed]:
    """Train a role on the same number of calls of each episode of a task, at most `most` (`align_call_counts`).

    Returns the rows to train on, some of them twice or more. Rows that are left out get a reason.
    """
    indices = align_call_counts([row.sample for row in rows], most)
    for i in set(range(len(rows))).difference(indices):
        rows[i].reason = "beyond_alignment"
    return [rows[i] for i in indices]


def _trim_groups(groups: Sequence[Group], trained: Sequence[Sample]) -> tuple[Group, ...]:
    """The groups with only their trained samples; groups without any are left out."""
    ids = {sample.id for sample in trained}
    trimmed: list[Group] = []
    for group in groups:
        remaining = tuple(sample for sample in group.samples if sample.id in ids)
        if remaining:
            trimmed.append(msgspec.structs.replace(group, samples=remaining))
    return tuple(trimmed)


def train_rows(
    prepared: Prepared, collected: Collected, store: Store, entropy_by: Callable[[str], str] = lambda policy: ""
) -> dict[str, list[TrainRow]]:
    """The rows of the learner's batch by role: samples with token ids, log-probabilities and advantages.

    `entropy_by` maps a policy to the component of the outcome that weighs the entropy bonus of its rows (`LossSpec`).
    """
    # Siblings share a prompt, images and grammar: read each only once from the store.
    prompts: dict[str, tuple[int, ...]] = {}
    images: dict[str, tuple[bytes, ...]] = {}
    grammars: dict[str, str] = {"": ""}
    rows: dict[str, list[TrainRow]] = {}
    for sample, advantage in zip(prepared.samples, prepared.advantages.tolist(), strict=True):
        call = collected.calls[sample.call]
        if sample.prompt not in prompts:
            assert call.prompt is not None
            prompts[sample.prompt] = store.token_ids(call.prompt)
            images[sample.prompt] = tuple(collected.images[name] for name in call.sampling.get("images") or ())
        grammar = call.sampling.get("grammar", "")
        if grammar not in grammars:
            grammars[grammar] = store.message(grammar)
        # A candidate id ends in the index of the candidate: `candidate_id`.
        index = int(sample.id.rpartition(".")[2])
        candidate = next(candidate for candidate in call.candidates if candidate.index == index)
        logit_bias = [(int(token), float(value)) for token, value in call.sampling.get("logit_bias") or ()]
        rows.setdefault(sample.role, []).append(
            TrainRow(
                id=sample.id,
                role=sample.role,
                prompt_ids=prompts[sample.prompt],
                response_ids=candidate.token_ids,
                logprobs=candidate.logprobs,
                advantage=advantage,
                temperature=temperature(call),
                grammar=grammars[grammar],
                logit_bias=tuple(logit_bias),
                version=sample.policy.version,
                trajectory=sample.rollout,
                exploration=sample.outcome.get(entropy_by(sample.policy.name), 1.0),
                images=images[sample.prompt],
            )
        )
    return rows


def _require_small(samples: Sequence[Sample], rewards: Floats) -> None:
    """Raise GroupError if a reward is too large for training."""
    too_large = np.flatnonzero(np.abs(rewards) > LARGEST_REWARD)
    if len(too_large) == 0:
        return
    sample = samples[too_large[0]]
    reward = rewards[too_large[0]]
    components = ", ".join(f"{name} {value:g}" for name, value in {**sample.outcome, **sample.rewards}.items())
    raise GroupError(
        f"Role {sample.role!r} has a reward of {reward:g} on task {sample.task!r} ({components}, before weights), "
        "which the 32-bit numbers of training cannot hold.",
        f"Weighed, rewards must lie between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}: return smaller ones, or "
        "lower `weights`.",
    )


def _missing_reward_warnings(
    samples: Sequence[Sample], has_reward: Bools, lacking: Collection[tuple[str, str]]
) -> Iterable[str]:
    """Warnings about rewards that are missing because of the set-up, not by chance.

    They are for each role without a single usable reward, and for each (role, component) in `lacking`, a component that
    some samples of the role lack although others of their group have it.
    """
    roles_with_reward = {samples[i].role for i in np.flatnonzero(has_reward)}
    for role in sorted({sample.role for sample in samples} - roles_with_reward):
        of_candidates: set[str] = set()
        of_episodes: set[str] = set()
        for sample in samples:
            if sample.role == role:
                of_candidates.update(sample.rewards)
                of_episodes.update(sample.outcome)
        yield (
            f"Role {role!r} has no reward that the recipe uses. Its candidates carry "
            f"{sorted(of_candidates) or 'none'}, its episodes {sorted(of_episodes) or 'none'}. Add a scorer for it, or "
            "name its components in `weights`."
        )
    for role, name in sorted(lacking):
        yield (
            f"Candidates of role {role!r} are left out as missing_reward: they lack {name!r}, which others that they "
            "are compared with carry. If it is optional, set absent = 0 in [rewards]."
        )


def _last_stages(
    samples: Sequence[Sample], has_reward: Bools, ties: Bools, groups: Sequence[Group], flat: Bools
) -> dict[str, Reached]:
    """The last stage that samples of each policy reached.

    `has_reward` and `ties` have an entry for each sample, [n]; `flat` says for each group whether its rewards are
    equal.
    """
    reached: dict[str, Reached] = {sample.policy.name: "no reward" for sample in samples}
    # Each loop is a later stage than the loop before, so it overwrites that one's entries.
    for i in np.flatnonzero(ties):
        reached[samples[i].policy.name] = "filtered"
    for i in np.flatnonzero(has_reward & ~ties):
        reached[samples[i].policy.name] = "no comparison"
    for group in groups:
        reached |= dict.fromkeys((member.policy.name for member in group.samples), "no signal")
    for i in np.flatnonzero(~flat):
        reached |= dict.fromkeys((member.policy.name for member in groups[i].samples), "filtered")
    return reached


def _lone_candidates_warning(recipe: Method, alone: int, total: int) -> Iterable[str]:
    """A warning if some of `total` candidates are alone in their group. Raises GroupError if the plan cannot work."""
    if not alone:
        return
    text = explain_alone(recipe, alone, total)
    if recipe.plan == "independent" and one_prompt(recipe) and alone > total / 2:
        raise GroupError(text)
    yield text


def group_spread(groups: Sequence[Group], rewards: Sequence[Floats], recipe: Method) -> Spread:
    """Spread of the rewards in each group; `rewards` has an array for each group, in the order of its samples."""
    members: list[Sample] = []
    group_of_member: list[int] = []
    for number, group in enumerate(groups):
        members += group.samples
        group_of_member += [number] * len(group.samples)
    reward_of_member: Floats = np.concatenate([np.zeros(0), *rewards])  # without groups there is nothing to join
    # A recipe compares the rewards of samples, of tokens, or of whole trajectories: its units.
    group_units = units(members, reward_of_member, np.array(group_of_member, np.int64), recipe.unit)
    return spread(group_units, len(groups))


def _rewards_to_show(samples: Sequence[Sample], step_samples: Sequence[Sample], rewards: Floats) -> Floats:
    """The rewards that figures show, [n]: NaN instead of the 0 that a failed episode has if no episode finished.

    With "lowest" a failed episode has the lowest reward of the finished episodes. Without any finished episode, its 0
    is no reward that a figure may show.
    """
    some_episode_finished = any(sample.failure is None for sample in step_samples)
    if some_episode_finished:
        return rewards
    shown = rewards.copy()
    for i, sample in enumerate(samples):
        has_rewards = sample.rewards or sample.outcome
        if sample.failure == "lowest" and not has_rewards:
            shown[i] = np.nan
    return shown


def _role_stats(
    samples: Sequence[Sample],
    reward: Floats,
    groups: Sequence[Group],
    stats: Spread,
    *,
    trained: Sequence[Sample],
    attribution: Attribution,
    task_weights: Mapping[str, float] | None,
) -> dict[str, RoleStats]:
    """Statistics by role; a group that spans several roles counts for each of them.

    `reward` is the reward of each sample, [n], and `stats` the spread of each group.
    """
    samples_of_role: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        samples_of_role.setdefault(sample.role, []).append(i)
    groups_of_role: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        # A group of one has no spread.
        if stats.size[number] > 1:
            for member in group.samples:
                groups_of_role.setdefault(member.role, set()).add(number)
    trained_of_role = Counter(sample.role for sample in trained)
    has_penalty = overlong_penalties(samples, attribution) > 0
    deviation = np.sqrt(stats.variance)

    stats_of_role: dict[str, RoleStats] = {}
    for role, indices in samples_of_role.items():
        means = means_by_task([samples[i] for i in indices], reward[indices])
        mean = mean_over_tasks(means, task_weights)
        group_numbers = sorted(groups_of_role.get(role, ()))
        mean_deviation = zero_variance = math.nan
        if group_numbers:
            mean_deviation = float(deviation[group_numbers].mean())
            zero_variance = float(stats.flat[group_numbers].mean())
        stats_of_role[role] = RoleStats(
            samples=len(indices),
            kept=trained_of_role[role],
            reward=math.nan if mean is None else mean,
            groups=len(group_numbers),
            group_spread=mean_deviation,
            zero_variance=zero_variance,
            truncated=float(np.mean([samples[i].truncated for i in indices])),
            overlong=float(has_penalty[indices].mean()),
        )
    return stats_of_role


def means_by_task(samples: Sequence[Sample], rewards: Floats) -> dict[str, float]:
    """The mean reward of each task over its samples with a reward; tasks without any are left out."""
    rewards_of_task: dict[str, list[float]] = {}
    for sample, reward in zip(samples, rewards.tolist(), strict=True):
        if not math.isnan(reward):
            rewards_of_task.setdefault(sample.task, []).append(reward)
    return {task: fmean(values) for task, values in rewards_of_task.items()}


def mean_over_tasks(means: Mapping[str, float], weights: Mapping[str, float] | None) -> float | None:
    """The mean over tasks of their means, by weight (None: all tasks weigh the same). None if all weights are 0."""
    weighted_sum = total_weight = 0.0
    for task, mean in means.items():
        weight = 1.0 if weights is None else weights.get(task, 0.0)
        weighted_sum += weight * mean
        total_weight += weight
    return weighted_sum / total_weight if total_weight else None
