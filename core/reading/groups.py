"""The groups that the recipe forms from a training step's records: rewards, advantages, candidates left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from cotune.algorithms.comparing import FLAT
from cotune.algorithms.filters import group_reasons
from cotune.algorithms.groups import Group
from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.prepare import Prepared, group_spread
from cotune.algorithms.run_recipe import Regrouped, config_of, recipes_of, regroup, trained_roles
from cotune.algorithms.samples import Floats, Sample
from cotune.reading.run import OpenedRun
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters

MOST_EPISODES = 200
"""Maximum number of episodes that are grouped without a training step, the latest ones."""
SAMPLE_REASONS = ("truncated", "timed_out_episode", "low_entropy", "no_signal", "frozen_step", "beyond_alignment")
"""Reasons why single samples are left out after their advantages are known, except `zero_advantage`."""


class ShownGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of samples. `rewards` are mixed as the recipe says and aligned with `samples`; `spread` is their standard
    deviation.

    `reason` is why none of its samples was trained on; empty if any was.
    """

    id: str
    key: Mapping[str, Hashable]
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    mean: float
    spread: float
    reason: str = ""

    @property
    def role(self) -> str:
        """The roles of its samples, joined by slashes."""
        return "/".join(sorted({sample.role for sample in self.samples}))

    @property
    def is_flat(self) -> bool:
        """Whether all rewards are equal, up to rounding."""
        return max(self.rewards) - min(self.rewards) <= FLAT * max(map(abs, self.rewards))


class StepGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a recipe forms from the episodes of a step. `advantages` and `group_of` are by candidate id.
    `idle` candidates have an advantage but were not trained on."""

    recipe: str = ""
    key: tuple[str, ...] = ()
    groups: tuple[ShownGroup, ...] = ()
    advantages: Mapping[str, float] = {}
    group_of: Mapping[str, str] = {}
    idle: frozenset[str] = frozenset()
    left_out: Mapping[str, int] = {}
    candidates: int = 0
    trained: int = 0
    """Number of candidates that were trained on."""
    problems: tuple[str, ...] = ()
    running: bool = False
    """Whether advantages also depend on a baseline from earlier steps, which the records do not hold."""
    capped: bool = False
    """Whether there may be earlier episodes than the `MOST_EPISODES` that were grouped."""


class GroupCell(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of one role at one turn: sizes, and means and standard deviations of their rewards."""

    sizes: tuple[int, ...]
    means: tuple[float, ...]
    spreads: tuple[float, ...]
    flat: int
    """Number of groups without spread."""
    trained: int


def step_groups(run: OpenedRun, training_step: int | None) -> StepGroups:
    """Groups and advantages of a training step; with None, of the latest episodes of any phase.

    The run's recipe forms them again, from the records.
    """
    store = run.store
    if not any(store.figures().newest()):
        return StepGroups(problems=("This run recorded no episodes.",))
    recipes, recipe_text = recipes_of(store)
    if training_step is None:
        latest_first = store.figures().episode_ids(EVERYTHING, MOST_EPISODES)
        episodes = [store.episode(id) for id in reversed(latest_first)]
    else:
        episodes = list(store.episodes(EpisodeFilters(phase="train", training_step=training_step)))
    # Grouping needs neither texts nor token ids, so it reads the calls without them (`lean`): a step of many calls
    # stays small in memory. `regroup` uses no other method of a store.
    lean_store: Any = SimpleNamespace(calls=functools.partial(store.calls, lean=True), rewards=store.rewards)
    roles = trained_roles(store, training_step)
    regrouped = regroup(lean_store, episodes, recipes, config_of(store), roles, training_step)
    groups = tuple(_shown_groups(regrouped, recipes))
    group_of: dict[str, str] = {}
    for group in groups:
        for sample in group.samples:
            group_of[sample.id] = group.id

    # If the recipe could not group these episodes, nothing is prepared, and `problems` says why.
    advantages: dict[str, float] = {}
    not_trained_on: frozenset[str] = frozenset()
    prepared = regrouped.prepared
    if prepared is not None:
        for sample, advantage in zip(prepared.samples, prepared.advantages.tolist(), strict=True):
            if not math.isnan(advantage):
                advantages[sample.id] = advantage
        not_trained_on = _ids_with_advantage(prepared) - {sample.id for sample in prepared.trained}
    return StepGroups(
        recipe=recipe_text,
        key=recipes.run.group_by,
        groups=groups,
        advantages=advantages,
        group_of=group_of,
        idle=not_trained_on,
        left_out=dict(sorted(regrouped.left_out.items(), key=lambda item: -item[1])),
        candidates=regrouped.candidates,
        trained=len(prepared.trained) if prepared else 0,
        problems=regrouped.problems,
        running=any(recipe.remembers for recipe in recipes.every),
        capped=training_step is None and len(episodes) >= MOST_EPISODES,
    )


def by_role_and_turn(groups: Iterable[ShownGroup]) -> dict[tuple[str, Any], GroupCell]:
    """Groups by role and turn, in this order. The turn is None if the recipe compares across turns."""
    by_cell: dict[tuple[str, Any], list[ShownGroup]] = {}
    for group in groups:
        by_cell.setdefault((group.role, group.key.get("turn")), []).append(group)

    def order(cell: tuple[str, Any]) -> tuple[str, bool, int]:
        role, turn = cell
        return role, turn is None, turn or 0

    cells: dict[tuple[str, Any], GroupCell] = {}
    for role, turn in sorted(by_cell, key=order):
        in_cell = by_cell[role, turn]
        cells[role, turn] = GroupCell(
            sizes=tuple(len(group.rewards) for group in in_cell),
            means=tuple(group.mean for group in in_cell),
            spreads=tuple(group.spread for group in in_cell),
            flat=sum(group.is_flat for group in in_cell),
            trained=sum(not group.reason for group in in_cell),
        )
    return cells


def _shown_groups(regrouped: Regrouped, recipes: Recipes) -> Iterable[ShownGroup]:
    """The groups of a step to show, each with the reason why it is not trained on; "" if it is."""
    if regrouped.prepared is None:
        return
    left_out = regrouped.prepared.left_out
    trained_ids = {sample.id for sample in regrouped.prepared.trained}
    ids_with_advantage = _ids_with_advantage(regrouped.prepared)
    first_samples = [group.samples[0] for group, _ in regrouped.groups]
    for _, recipe, indices in recipes.split(first_samples):
        groups: list[Group] = []
        rewards_of_groups: list[Floats] = []
        for i in indices:
            group, rewards = regrouped.groups[i]
            groups.append(group)
            rewards_of_groups.append(rewards)

        # For these reasons training leaves out samples, and it counts them for the whole step. So for a group that is
        # not trained on and has no reason of its own, only the possible reasons are known.
        possible_reasons = [*SAMPLE_REASONS]
        if recipe.filters.zero_advantage:
            possible_reasons.append("zero_advantage")
        sample_reasons = " or ".join(reason for reason in possible_reasons if left_out.get(reason))

        spreads = group_spread(groups, rewards_of_groups, recipe)
        reasons_of_groups = group_reasons(groups, spreads, recipe.filters, ())
        for group, rewards, group_reason in zip(groups, rewards_of_groups, reasons_of_groups, strict=True):
            ids = {sample.id for sample in group.samples}
            if ids & trained_ids:  # a group with any trained sample counts as trained on
                reason = ""
            elif group_reason:
                reason = group_reason
            elif ids & ids_with_advantage:
                reason = "zero_advantage"
            else:
                reason = sample_reasons or "tie"
            yield ShownGroup(
                id=group.id,
                key=dict(zip(recipe.group_by, group.key, strict=True)),
                samples=group.samples,
                rewards=tuple(rewards.tolist()),
                mean=float(rewards.mean()),
                spread=float(rewards.std()),
                reason=reason,
            )


def _ids_with_advantage(prepared: Prepared) -> frozenset[str]:
    """Ids of the samples in the rows of the update, trained on or not."""
    return frozenset(sample.id for sample in prepared.samples)
