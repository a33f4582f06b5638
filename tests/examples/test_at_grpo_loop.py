"""The method as one script: it trains both policies, by the same advantages as `cotune train`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotune.algorithms.collect import collect
from cotune.algorithms.prepare import prepare, train_rows
from cotune.algorithms.samples import TrainRow
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from examples import at_grpo_loop as example
from examples.plan_path.base import build


def test_two_steps_train_both_policies(in_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "base", steps=20, count=400)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    update, trained, moved = LocalLearner.update, [], []

    def watched(self: LocalLearner, policy: str, rows: Sequence[TrainRow], **settings: Any) -> Any:
        before = self.weights(policy)
        figures = update(self, policy, rows, **settings)
        after = self.weights(policy)
        moved.append(any(not np.array_equal(before[name], after[name]) for name in before))
        trained.extend(rows)
        return figures

    monkeypatch.setattr(LocalLearner, "update", watched)
    options = example.Options(
        model=str(tmp_path / "base"), out=tmp_path, steps=2, tasks_per_step=4, held_out=2, k=4, lr=3e-3
    )
    results = asyncio.run(example.train(options))

    assert len(results) == 2 and moved == [True] * 4
    for result in results:
        assert result.gap < 1e-4 and 0.0 <= result.success <= 1.0
        assert result.reward.keys() == {"navigator", "driver"}
    store = SqliteStore.open(tmp_path / "records.db", read_only=True)
    wanted: dict[str, float] = {}
    for step in range(2):
        episodes = list(store.episodes(EpisodeFilters(phase="train", training_step=step)))
        collected = collect(store, episodes, plan="tree", roles=example.ROLES)
        rows = train_rows(prepare(collected.samples, example.METHOD), collected, store)
        wanted |= {row.id: row.advantage for role_rows in rows.values() for row in role_rows}
        versions = {call.policy.version for episode in episodes for call in store.calls(episode.id)}
        assert versions == {step}
    assert {row.id: row.advantage for row in trained} == pytest.approx(wanted)
    evaluated = [e for e in store.episodes(EpisodeFilters(phase="eval", training_step=1)) for e in store.calls(e.id)]
    assert {(call.policy.version, len(call.candidates)) for call in evaluated} == {(2, 1)}
