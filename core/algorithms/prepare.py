"""From the samples of a step to what is trained on: filters, groups, rewards, advantages, rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal

import msgspec
import numpy as np

from cotune.algorithms.advantages import AdvantageState, Spread, combine, spread, units
from cotune.algorithms.align import align
from cotune.algorithms.attribution import LARGEST, Bools, Codes, Floats, attribute, codes, lacking, overlong
from cotune.algorithms.collect import Collected, temperature
from cotune.algorithms.filters import group_reasons, high_entropy, sample_reason, tied
from cotune.algorithms.groups import Group, build_groups, explain_alone, one_prompt
from cotune.algorithms.recipes import Attribution, Recipe
from cotune.algorithms.samples import Sample, TrainRow
from cotune.algorithms.shaping import shape
from cotune.errors import GroupError
from cotune.storage.protocol import Store

Reached = Literal["no reward", "no comparison", "no signal", "filtered"]
"""Why a policy with samples has nothing to learn from, unless some are trained on: none has its reward, none has others
to be compared with, all that were compared are equal, or filters left out those that differ."""


class RoleStats(msgspec.Struct, frozen=True, kw_only=True):
    """One role in one step. Rewards are the recipe's mixed ones.

    `reward` is the mean over all samples that have one, kept or not, and `task_reward` that of the means of each task,
    which does not move where some tasks get more samples than others. `groups` counts groups of two or more,
    `group_spread` is the mean of their standard deviations (population), `zero_variance` the share whose rewards are
    all equal, both NaN without a group. `kept` counts the samples that are trained on. `truncated` is the share of all
    samples that were cut at their length limit, `overlong` of those that lose reward by their length.
    """

    samples: int
    kept: int
    reward: float
    groups: int
    group_spread: float
    zero_variance: float
    truncated: float = 0.0
    overlong: float = 0.0
    task_reward: float = math.nan


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
    """Mean reward of all candidates that have one, kept or not; None without any."""
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
    decays: bool = False,
    others: Sequence[Sample] = (),
) -> Prepared:
    """Attribute rewards, build groups, filter, compute advantages, filter again; count whatever is left out.

    `consumed` holds the ids of groups that were trained on before, `others` what else was answered in the episodes
    (`Collected.others`). A policy whose advantages are all zero has no signal: its samples are left out, unless the
    loss or weight decay (`decays`) moves it all the same. Raises GroupError when candidates of different prompts meet
    in a group that must share one, and when more than half of the candidates of independent rollouts stand alone under
    a recipe that compares candidates of one prompt.
    """
    state = state or AdvantageState()
    left_out: Counter[str] = Counter()
    every = [*samples, *others]
    returns = [attribute(every, term.attribution, term.key)[: len(samples)] for term in recipe.terms]
    shown = _shown(samples, every, returns[0])
    for rewards in returns:
        _require_small(samples, rewards)
    if not recipe.takes_rewards:
        returns = [np.nan_to_num(values) for values in returns]
    complete = ~np.isnan(np.sum(returns, axis=0)) if samples else np.zeros(0, np.bool_)
    left_out["missing_reward"] = int((~complete).sum())
    ties = complete & tied(samples, returns[0]) if recipe.filters.ties else np.zeros(len(samples), np.bool_)
    left_out["tie"] = int(ties.sum())
    rewarded = [sample for sample, stays in zip(samples, (complete & ~ties).tolist(), strict=True) if stays]
    going_on = [sample for sample in rewarded if sample.continues]
    rewarded = [sample for sample in rewarded if not sample.continues]
    built = build_groups(rewarded, recipe)
    left_out.update(built.left_out)
    warnings = [
        *_missing(samples, complete),
        *(_lacking(every, recipe) if recipe.takes_rewards else ()),
        *_alone(recipe, left_out["group_of_one"], len(rewarded)),
    ]

    place = {sample.id: i for i, sample in enumerate(samples)}
    members = [sample for group in built.groups for sample in group.samples]
    order = np.array([place[sample.id] for sample in members], np.int64)
    number = np.repeat(np.arange(len(built.groups)), [len(group.samples) for group in built.groups])
    stats = group_spread(members, returns[0][order], number, recipe, len(built.groups))
    reasons = group_reasons(built.groups, stats, recipe.filters, consumed)
    for group, reason in zip(built.groups, reasons, strict=True):
        if reason is not None:
            left_out[reason] += len(group.samples)

    stays = np.array([reason is None for reason in reasons], np.bool_)[number]
    kept = [sample for sample, stay in zip(members, stays, strict=True) if stay]
    order = order[stays]
    values, state = combine(kept, [r[order] for r in returns], recipe.terms, state)
    values = shape(kept, values, recipe.shaping)
    groups = [group for group, reason in zip(built.groups, reasons, strict=True) if reason is None]
    more, more_values = _continuations(going_on, kept, values)
    left_out["continuation"] = len(going_on) - len(more)
    kept, values = [*kept, *more], np.concatenate([values, more_values])
    gone = [sample_reason(s, value, recipe.filters) for s, value in zip(kept, values.tolist(), strict=True)]
    if recipe.filters.top_entropy is not None:
        high = [*high_entropy(groups, recipe.filters.top_entropy), *[True] * len(more)]
        gone = [reason or (None if stays else "low_entropy") for reason, stays in zip(gone, high, strict=True)]
    left_out.update(reason for reason in gone if reason is not None)
    stays = np.array([reason is None for reason in gone], np.bool_)
    groups = _only(groups, stays)
    kept = [sample for sample, stay in zip(kept, stays, strict=True) if stay]
    values = values[stays]
    if not (decays or recipe.loss.moves_alone):
        signal = {sample.policy.name for sample, value in zip(kept, values.tolist(), strict=True) if value}
        moves = np.array([sample.policy.name in signal for sample in kept], np.bool_)
        left_out["no_signal"] = int((~moves).sum())
        groups = _only(groups, moves)
        kept = [sample for sample in kept if sample.policy.name in signal]
        values = values[moves]
    rows = np.arange(len(kept))
    if recipe.filters.align_to is not None:
        rows = np.array(align(kept, recipe.filters.align_to), np.int64)
    stays = np.isin(np.arange(len(kept)), rows)
    left_out["beyond_alignment"] = int((~stays).sum())
    teaches = (values != 0.0) | recipe.loss.moves_alone
    left_out["zero_advantage"] += int((stays & ~teaches).sum())
    groups = _only(groups, stays & teaches)
    trained = [kept[i] for i in rows[teaches[rows]]]
    return Prepared(
        samples=tuple(kept[i] for i in rows),
        advantages=values[rows],
        trained=tuple(trained),
        groups=tuple(groups),
        left_out={reason: count for reason, count in left_out.items() if count},
        roles=_role_stats(samples, shown, members, number, stats, trained, recipe.attribution),
        reward=float(np.nanmean(shown)) if (~np.isnan(shown)).any() else None,
        reached=_reached(samples, complete, ties, members, stats.flat[number]),
        warnings=tuple(warnings),
        state=state,
    )


def train_rows(
    prepared: Prepared, collected: Collected, store: Store, entropy_by: str = ""
) -> dict[str, list[TrainRow]]:
    """Rows for the learner by role, with the token ids and the sampler's log-probabilities as recorded; `entropy_by`
    names the component of the outcome that weighs a row's entropy bonus (`LossSpec`)."""
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
        index = int(sample.id.rpartition(".")[2])
        candidate = next(c for c in call.candidates if c.index == index)
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
                logit_bias=tuple((int(token), float(value)) for token, value in call.sampling.get("logit_bias") or ()),
                version=sample.policy.version,
                trajectory=sample.rollout,
                exploration=sample.outcome.get(entropy_by, 1.0),
                images=images[sample.prompt],
            )
        )
    return rows


def _continuations(samples: Sequence[Sample], first: Sequence[Sample], values: Floats) -> tuple[list[Sample], Floats]:
    """What branches went on to say, each with the advantage of the candidate that its branch began with, which is in
    `first` ([n], as `values`); without those whose candidate is not there.

    That advantage is the outcome less what the siblings of the fork had, which no call after the fork has a part in: a
    baseline for all of them, and a closer one than the mean of whole episodes.
    """
    of_branch = {sample.rollout: value for sample, value in zip(first, values.tolist(), strict=True)}
    found = [sample for sample in samples if sample.rollout in of_branch]
    return found, np.array([of_branch[sample.rollout] for sample in found], np.float64)


def _require_small(samples: Sequence[Sample], rewards: Floats) -> None:
    """Raise GroupError where a reward is beyond what training can hold."""
    for i in np.flatnonzero(np.abs(rewards) > LARGEST)[:1]:
        sample = samples[i]
        named = ", ".join(f"{name} {value:g}" for name, value in {**sample.outcome, **sample.rewards}.items())
        raise GroupError(
            f"Role {sample.role!r} has a reward of {rewards[i]:g} on task {sample.task!r} ({named}, before weights), "
            "which the 32-bit numbers of training cannot hold.",
            f"Weighed, rewards must lie between -{LARGEST:g} and {LARGEST:g}: return smaller ones, or lower `weights`.",
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
            "are compared with carry. If it is optional, set absent = 0 under [overrides]."
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
    _, group, value, weight = units(samples, reward, number, recipe.terms[0])
    return spread(value, group, weight, count)


def _shown(samples: Sequence[Sample], every: Sequence[Sample], rewards: Floats) -> Floats:
    """`rewards` [n] as far as they are known: `lowest` says nothing of failures where no episode ended well."""
    if any(sample.failure is None for sample in every):
        return rewards
    unknown = np.array([s.failure == "lowest" and not (s.rewards or s.outcome) for s in samples], np.bool_)
    return np.where(unknown, np.nan, rewards)


def _only(groups: Sequence[Group], moves: Bools) -> list[Group]:
    """The groups without the samples that do not move; groups left empty are gone."""
    flags = iter(moves.tolist())
    trimmed = [tuple(s for s in group.samples if next(flags)) for group in groups]
    pairs = zip(groups, trimmed, strict=True)
    return [msgspec.structs.replace(group, samples=samples) for group, samples in pairs if samples]


def _role_stats(
    samples: Sequence[Sample],
    reward: Floats,
    members: Sequence[Sample],
    number: Codes,
    stats: Spread,
    trained: Sequence[Sample],
    attribution: Attribution,
) -> dict[str, RoleStats]:
    """Statistics by role; a group that spans several roles counts for each of them."""
    role, names = codes([s.role for s in samples])
    totals = np.bincount(role, minlength=len(names))
    having = np.bincount(role, ~np.isnan(reward), minlength=len(names))
    sums = np.bincount(role, np.nan_to_num(reward), minlength=len(names))
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
        result[str(name)] = RoleStats(
            samples=int(totals[i]),
            kept=kept[str(name)],
            reward=float(sums[i] / having[i]) if having[i] else float("nan"),
            groups=len(own),
            group_spread=float(deviation[own].mean()) if own else math.nan,
            zero_variance=float(stats.flat[own].mean()) if own else math.nan,
            truncated=float(cut[i] / totals[i]),
            overlong=float(long[i] / totals[i]),
            task_reward=fmean(by_task[str(name)]) if str(name) in by_task else math.nan,
        )
    return result


def _means_by_task(samples: Sequence[Sample], reward: Floats) -> dict[str, list[float]]:
    """The mean reward of each task that has one, by role."""
    place, pairs = codes([(s.role, s.task) for s in samples])
    having = np.bincount(place, ~np.isnan(reward), minlength=len(pairs))
    sums = np.bincount(place, np.nan_to_num(reward), minlength=len(pairs))
    found: dict[str, list[float]] = {}
    for i, pair in enumerate(pairs):
        assert isinstance(pair, tuple)
        if having[i]:
            found.setdefault(pair[0], []).append(float(sums[i] / having[i]))
    return found
