"""The groups that the recipe makes of a training step's records: rewards, advantages, candidates left out."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from cotune.algorithms.comparing import FLAT
from cotune.algorithms.filters import group_reasons
from cotune.algorithms.groups import Group
from cotune.algorithms.method import Method
from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.prepare import Prepared, group_spread
from cotune.algorithms.run_recipe import Regrouped, config_of, recipes_of, regroup, trained_roles
from cotune.algorithms.samples import Floats, Sample
from cotune.reading.run import OpenedRun
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters

MOST_EPISODES = 200
"""Episodes that are grouped where they belong to no training step, the latest ones."""
AFTER = ("truncated", "timed_out_episode", "low_entropy", "no_signal", "frozen_step", "beyond_alignment")
"""Reasons for which samples are left out once they have advantages, except `zero_advantage`."""


class ShownGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group: `rewards` are the recipe's mixed ones, aligned with `samples`, `spread` their standard deviation.

    `reason` says why nothing of it was trained on; empty where something was.
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
        return "/".join(sorted({sample.role for sample in self.samples}))


class StepGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a recipe makes of the episodes of a step. `advantages` and `group_of` are by candidate id; `idle`
    candidates have an advantage of 0 and teach nothing."""

    recipe: str = ""
    key: tuple[str, ...] = ()
    groups: tuple[ShownGroup, ...] = ()
    advantages: Mapping[str, float] = {}
    group_of: Mapping[str, str] = {}
    idle: frozenset[str] = frozenset()
    left_out: Mapping[str, int] = {}
    candidates: int = 0
    trained: int = 0
    """Candidates that were trained on."""
    problems: tuple[str, ...] = ()
    running: bool = False
    """Whether advantages also depend on a baseline that earlier steps have left, which the records do not hold."""
    capped: bool = False


class GroupCell(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of one role at one turn: sizes, and means and standard deviations of their rewards."""

    sizes: tuple[int, ...]
    means: tuple[float, ...]
    spreads: tuple[float, ...]
    flat: int
    """Groups without spread."""
    trained: int


def step_groups(run: OpenedRun, training_step: int | None) -> StepGroups:
    """Groups and advantages of a training step; with None, of the latest episodes, whatever they were run for."""
    store = run.store
    if not any(store.figures().newest()):
        return StepGroups(problems=("This run recorded no episodes.",))
    recipes, why = recipes_of(store)
    if training_step is None:
        episodes = [store.episode(id) for id in reversed(store.figures().episode_ids(EVERYTHING, MOST_EPISODES))]
    else:
        episodes = list(store.episodes(EpisodeFilters(phase="train", training_step=training_step)))
    # Grouping needs neither texts nor token ids: a step of many calls stays small in memory.
    lean: Any = SimpleNamespace(calls=functools.partial(store.calls, lean=True), rewards=store.rewards)
    roles = trained_roles(store, training_step)
    found = regroup(lean, episodes, recipes, config_of(store), roles, training_step)
    groups = tuple(_groups(found, recipes))
    prepared = found.prepared
    weighed = zip(prepared.samples, prepared.advantages.tolist(), strict=True) if prepared else ()
    return StepGroups(
        recipe=why,
        key=recipes.run.group_by,
        groups=groups,
        advantages={sample.id: value for sample, value in weighed if value == value},
        group_of={sample.id: group.id for group in groups for sample in group.samples},
        idle=_weighed(prepared) - {sample.id for sample in prepared.trained} if prepared else frozenset(),
        left_out=dict(sorted(found.left_out.items(), key=lambda item: -item[1])),
        candidates=found.candidates,
        trained=len(prepared.trained) if prepared else 0,
        problems=found.problems,
        running=any(recipe.remembers for recipe in recipes.every),
        capped=training_step is None and len(episodes) >= MOST_EPISODES,
    )


def by_role_and_turn(groups: Iterable[ShownGroup]) -> dict[tuple[str, Any], GroupCell]:
    """Groups by role and turn (None where the recipe compares across turns), in this order."""
    of: dict[tuple[str, Any], list[ShownGroup]] = {}
    for group in groups:
        of.setdefault((group.role, group.key.get("turn")), []).append(group)
    return {
        cell: GroupCell(
            sizes=tuple(len(group.rewards) for group in of[cell]),
            means=tuple(group.mean for group in of[cell]),
            spreads=tuple(group.spread for group in of[cell]),
            flat=sum(max(g.rewards) - min(g.rewards) <= FLAT * max(map(abs, g.rewards)) for g in of[cell]),
            trained=sum(not group.reason for group in of[cell]),
        )
        for cell in sorted(of, key=lambda cell: (cell[0], cell[1] is None, cell[1] or 0))
    }


def _groups(found: Regrouped, recipes: Recipes) -> Iterable[ShownGroup]:
    if found.prepared is None:
        return
    trained = {sample.id for sample in found.prepared.trained}
    weighed = _weighed(found.prepared)
    for _, recipe, places in recipes.split([group.samples[0] for group, _ in found.groups]):
        among = [found.groups[i] for i in places]
        after = (*AFTER, "zero_advantage") if recipe.filters.zero_advantage else AFTER
        late = " or ".join(name for name in after if found.prepared.left_out.get(name))
        for (group, values), reason in zip(among, _reasons(among, recipe), strict=True):
            kept = any(s.id in trained for s in group.samples)
            flat = "zero_advantage" if any(s.id in weighed for s in group.samples) else ""
            yield ShownGroup(
                id=group.id,
                key=dict(zip(recipe.group_by, group.key, strict=True)),
                samples=group.samples,
                rewards=tuple(values.tolist()),
                mean=float(values.mean()),
                spread=float(values.std()),
                reason="" if kept else reason or flat or late or "tie",
            )


def _weighed(prepared: Prepared) -> frozenset[str]:
    return frozenset(sample.id for sample in prepared.samples)


def _reasons(groups: Sequence[tuple[Group, Floats]], recipe: Method) -> list[str | None]:
    spreads = group_spread([group for group, _ in groups], [values for _, values in groups], recipe)
    return group_reasons([group for group, _ in groups], spreads, recipe.filters, ())
