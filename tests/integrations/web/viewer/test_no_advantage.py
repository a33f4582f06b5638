"""Candidates without advantage have a badge of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotune.integrations.web.viewer.server import viewing
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Episode, PolicyRef, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.web.viewer.test_pages import text


def sampled(episode: str, step: int, rewards: list[float]) -> list[Any]:
    """An episode of one call with a candidate for each reward."""
    call = f"C{episode}"
    candidates = [
        Candidate(index=i, text="x", message={"content": "x"}, token_ids=(1, 2), logprobs=(-1.0, -1.0))
        for i in range(len(rewards))
    ]
    return [
        CallRecord(
            id=call,
            episode=episode,
            role="writer",
            step=0,
            turn=0,
            messages=(),
            prompt=f"P{episode}",
            prompt_tokens=3,
            policy=PolicyRef("writer", step),
            candidates=tuple(candidates),
            chosen=0,
            sampling={"temperature": 1.0},
        ),
        *(RewardRecord(candidate_id(call, i), "local", value) for i, value in enumerate(rewards)),
        Episode(
            id=episode,
            task=Task(id=f"t{episode}", input="x"),
            workflow="w",
            phase="train",
            training_step=step,
            calls=1,
        ),
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A step with a group with spread and one without."""
    folder = tmp_path / "r1"
    folder.mkdir()
    config = {"steps": 4, "recipe": "at_grpo", "plan": {"kind": "tree", "k": 3}, "rewards": {"zero_variance": False}}
    (folder / "run.json").write_text(json.dumps({"model": "m", "config": config}))
    counts = {"outcome": {}, "left_out": {}, "calls": 2, "candidates": 6, "groups": 2, "rows": 2}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "roles": {"writer": {"reward": 0.5}}, **counts}))
    with SqliteStore.open(folder) as store:
        store.write(sampled("A", 0, [0.0, 0.5, 1.0]))
        store.write(sampled("B", 0, [0.5, 0.5, 0.5]))
    return folder


def test_candidates_without_advantage_have_a_badge_of_their_own(run: Path) -> None:
    with viewing([run]) as server:
        groups = text(f"{server.url}/run/r1/groups?step=1")
        flat, spread = (httpx.get(f"{server.url}/run/r1/episode/{id}").text for id in ("B", "A"))
    assert groups.count("trained on") >= 2 and "no advantage" in groups
    assert flat.count("s-idle") == 3 and spread.count("s-idle") == 1
