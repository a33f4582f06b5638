"""The groups of one training step as the recipe makes them of the records: rewards, advantages, what was left out."""

from __future__ import annotations

import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from cotune.algorithms.filters import group_reasons
from cotune.algorithms.groups import Group
from cotune.algorithms.prepare import Prepared, group_spread
from cotune.algorithms.recipes import Recipe
from cotune.algorithms.run_recipe import GroupCell, Regrouped, config_of, recipe_of, regroup, trained_roles
from cotune.algorithms.samples import Floats, Sample
from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.records.structs import CallRecord, Candidate, Episode
from cotune.storage.protocol import Store
from cotune.storage.schema import StoredCandidate

MOST_EPISODES = 200
"""Episodes that are grouped where they belong to no training step, the latest ones."""
AFTER = ("truncated", "timed_out_episode", "low_entropy", "no_signal", "beyond_alignment")
"""Reasons for which samples are left out once they have advantages, beside `zero_advantage`."""


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
    """What a recipe makes of the episodes of a step. `advantages` and `group_of` are by candidate id; `idle` candidates
    have an advantage of 0 and teach nothing."""

    recipe: str
    groups: tuple[ShownGroup, ...]
    advantages: Mapping[str, float]
    group_of: Mapping[str, str]
    idle: frozenset[str] = frozenset()
    left_out: Mapping[str, int]
    candidates: int
    problems: tuple[str, ...]
    running: bool
    """Whether advantages also depend on a baseline that earlier steps have left, which the records do not hold."""
    capped: bool = False


class _Lean:
    """A store whose candidates have the lengths of their arrays only: a step of many calls stays small in memory."""

    _stored = msgspec.json.Decoder(list[StoredCandidate])
    _call = msgspec.json.Decoder(CallRecord)

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rewards = store.rewards

    def calls(self, episode: str) -> list[CallRecord]:
        sql = "SELECT body, candidates, logprobs FROM calls WHERE episode = ? ORDER BY step, id"
        return [call for row in self._store.rows(sql, (episode,)) for call in self._read(*row)]

    def _read(self, body: str, candidates: str, logprobs: bytes) -> Iterable[CallRecord]:
        try:
            call, stored = self._call.decode(body), self._stored.decode(candidates)
        except (ValueError, TypeError, RecursionError):
            return
        values, at, found = array.array("f", logprobs[: len(logprobs) // 4 * 4]), 0, []
        for c in stored:
            found.append(
                Candidate(
                    index=c.index,
                    text=c.text[:1],
                    message={"tool_calls": c.message["tool_calls"][:1]} if c.message.get("tool_calls") else {},
                    token_ids=cast(tuple[int, ...], range(c.tokens)),
                    logprobs=cast(tuple[float, ...], values[at : at + c.logprobs]),
                    finish_reason=c.finish_reason,
                )
            )
            at += c.logprobs
        yield msgspec.structs.replace(call, candidates=tuple(found))


def step_groups(run: OpenedRun, training_step: int | None) -> StepGroups:
    """Groups and advantages of a training step; with None, of the latest episodes, whatever they were run for."""
    store = run.store
    if store is None:
        return StepGroups(
            recipe="",
            groups=(),
            advantages={},
            group_of={},
            left_out={},
            candidates=0,
            problems=("This run recorded no episodes.",),
            running=False,
        )
    recipe, why = recipe_of(store)
    episodes = _episodes(store, training_step)
    roles = trained_roles(store, training_step)
    found = regroup(cast(Store, _Lean(store)), episodes, recipe, config_of(store), roles)
    groups = tuple(_groups(found, recipe))
    prepared = found.prepared
    weighed = zip(prepared.samples, prepared.advantages.tolist(), strict=True) if prepared else ()
    advantages = {sample.id: value for sample, value in weighed if value == value}
    return StepGroups(
        recipe=why,
        groups=groups,
        advantages=advantages,
        group_of={sample.id: group.id for group in groups for sample in group.samples},
        idle=_weighed(prepared) - {sample.id for sample in prepared.trained} if prepared else frozenset(),
        left_out=dict(sorted(found.left_out.items(), key=lambda item: -item[1])),
        candidates=found.candidates,
        problems=found.problems,
        running=any(term.baseline == "ema" for term in recipe.terms),
        capped=training_step is None and len(episodes) >= MOST_EPISODES,
    )


def by_role_and_turn(groups: Iterable[ShownGroup]) -> dict[tuple[str, Any], GroupCell]:
    """Counts of groups by role and turn (None where the recipe compares across turns), in this order."""
    cells: dict[tuple[str, Any], GroupCell] = {}
    for group in groups:
        cell = cells.setdefault((group.role, group.key.get("turn")), GroupCell())
        cell.add(np.array(group.rewards), not group.reason)
    return dict(sorted(cells.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1] or 0)))


def _episodes(store: Store, training_step: int | None) -> list[Episode]:
    if training_step is not None:
        return list(store.episodes(phase="train", training_step=training_step))
    found = store.rows("SELECT id FROM episodes ORDER BY id DESC LIMIT ?", (MOST_EPISODES,))
    from_id = found[-1][0] if found else ""
    sql = "SELECT id FROM episodes WHERE id >= ? ORDER BY id"
    return [store.episode(id) for (id,) in store.rows(sql, (from_id,))]


def _groups(found: Regrouped, recipe: Recipe) -> Iterable[ShownGroup]:
    if found.prepared is None:
        return
    reasons = _reasons(found.groups, recipe)
    trained = {sample.id for sample in found.prepared.trained}
    weighed = _weighed(found.prepared)
    after = (*AFTER, "zero_advantage") if recipe.filters.zero_advantage else AFTER
    late = " or ".join(name for name in after if found.prepared.left_out.get(name))
    for (group, values), reason in zip(found.groups, reasons, strict=True):
        kept = any(s.id in trained for s in group.samples)
        flat = "zero_advantage" if any(s.id in weighed for s in group.samples) else ""
        yield ShownGroup(
            id=group.id,
            key=dict(zip(recipe.key, group.key, strict=True)),
            samples=group.samples,
            rewards=tuple(values.tolist()),
            mean=float(values.mean()),
            spread=float(values.std()),
            reason="" if kept else reason or flat or late or "tie",
        )


def _weighed(prepared: Prepared) -> frozenset[str]:
    return frozenset(sample.id for sample in prepared.samples)


def _reasons(groups: Sequence[tuple[Group, Floats]], recipe: Recipe) -> list[str | None]:
    if not groups:
        return []
    members = [sample for group, _ in groups for sample in group.samples]
    number = np.repeat(np.arange(len(groups)), [len(values) for _, values in groups])
    values = np.concatenate([values for _, values in groups])
    spreads = group_spread(members, values, number, recipe, len(groups))
    return group_reasons([group for group, _ in groups], spreads, recipe.filters, ())
