"""The groups of one training step as the recipe makes them of the records: rewards, advantages, what was left out."""

from __future__ import annotations

import array
from collections.abc import Hashable, Iterable, Mapping
from typing import cast

import msgspec
import numpy as np

from cotune.algorithms.advantages import spread, units
from cotune.algorithms.attribution import attribute
from cotune.algorithms.collect import Collected, collect, failure_reward
from cotune.algorithms.filters import group_reasons
from cotune.algorithms.groups import Group, build_groups
from cotune.algorithms.prepare import Prepared, prepare
from cotune.algorithms.recipes import Recipe
from cotune.algorithms.run_recipe import config_of, recipe_of
from cotune.algorithms.samples import Sample
from cotune.errors import GroupError
from cotune.integrations.viewer.opened import OpenedRun
from cotune.recording.records import CallRecord, Candidate, Episode
from cotune.storage.protocol import Store
from cotune.storage.schema import StoredCandidate
from cotune.storage.sqlite_store import SqliteStore

MOST_EPISODES = 200
"""Episodes that are grouped where they belong to no training step, the latest ones."""
AFTER = ("truncated", "timed_out_episode", "zero_advantage", "low_entropy", "no_signal", "beyond_alignment")
"""Reasons for which samples are left out once they have advantages."""


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
    """What a recipe makes of the episodes of a step. `advantages` and `group_of` are by candidate id."""

    recipe: str
    groups: tuple[ShownGroup, ...]
    advantages: Mapping[str, float]
    group_of: Mapping[str, str]
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

    def __init__(self, store: SqliteStore) -> None:
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
    config = config_of(store)
    episodes = _episodes(store, training_step)
    collected = collect(
        cast(Store, _Lean(store)),
        episodes,
        plan=recipe.plan,
        roles=[role for role in run.config.get("roles") or [] if isinstance(role, str)] or None,
        on_failure=failure_reward(config.on_failure),
    )
    left_out = dict(collected.left_out)
    problems: list[str] = []
    groups: tuple[ShownGroup, ...] = ()
    advantages: dict[str, float] = {}
    try:
        prepared = prepare(collected.samples, recipe, decays=config.learner.weight_decay > 0)
    except GroupError as error:
        problems.append(str(error))
    else:
        for reason, count in prepared.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
        problems.extend(prepared.warnings)
        advantages = {s.id: float(a) for s, a in zip(prepared.samples, prepared.advantages.tolist(), strict=True)}
        groups = tuple(_groups(collected, recipe, prepared))
    return StepGroups(
        recipe=why,
        groups=groups,
        advantages=advantages,
        group_of={sample.id: group.id for group in groups for sample in group.samples},
        left_out=dict(sorted(left_out.items(), key=lambda item: -item[1])),
        candidates=len(collected.samples) + sum(collected.left_out.values()),
        problems=tuple(problems),
        running=any(term.baseline == "ema" for term in recipe.terms),
        capped=training_step is None and len(episodes) >= MOST_EPISODES,
    )


def _episodes(store: SqliteStore, training_step: int | None) -> list[Episode]:
    if training_step is not None:
        return list(store.episodes(phase="train", training_step=training_step))
    found = store.rows("SELECT id FROM episodes ORDER BY id DESC LIMIT ?", (MOST_EPISODES,))
    from_id = found[-1][0] if found else ""
    sql = "SELECT id FROM episodes WHERE id >= ? ORDER BY id"
    return [store.episode(id) for (id,) in store.rows(sql, (from_id,))]


def _groups(collected: Collected, recipe: Recipe, prepared: Prepared) -> Iterable[ShownGroup]:
    samples = collected.samples
    reward = dict(zip((s.id for s in samples), attribute(samples, recipe.attribution).tolist(), strict=True))
    built = build_groups([s for s in samples if reward[s.id] == reward[s.id]], recipe).groups
    reasons = _reasons(built, reward, recipe)
    trained = {sample.id for sample in prepared.samples}
    late = " or ".join(name for name in AFTER if prepared.left_out.get(name))
    for group, reason in zip(built, reasons, strict=True):
        values = np.array([reward[s.id] for s in group.samples])
        kept = any(s.id in trained for s in group.samples)
        yield ShownGroup(
            id=group.id,
            key=dict(zip(recipe.key, group.key, strict=True)),
            samples=group.samples,
            rewards=tuple(values.tolist()),
            mean=float(values.mean()),
            spread=float(values.std()),
            reason="" if kept else reason or late or "tie",
        )


def _reasons(groups: tuple[Group, ...], reward: Mapping[str, float], recipe: Recipe) -> list[str | None]:
    members = [sample for group in groups for sample in group.samples]
    number = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    values = np.array([reward[sample.id] for sample in members])
    if not members:
        return []
    _, group, value, weight = units(members, values, number, recipe.terms[0])
    return group_reasons(groups, spread(value, group, weight, len(groups)), recipe.filters, ())
