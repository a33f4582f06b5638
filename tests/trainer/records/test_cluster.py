"""Learning from records on FSDP workers ends with the weights of a local run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cotune.judging.labels import load_labels
from tests.trainer.conftest import Trainer
from tests.trainer.learner.fsdp_ranks import RUN_EPS
from tests.trainer.records.records import traced
from tests.trainer.records.test_sweet_rl import recorded_team, writer
from tests.trainer.tiny_app import application, converse

pytestmark = pytest.mark.slow

CLUSTER = {"address": "local", "learners": 2}
STEPS = {"steps": 3, "tasks_per_step": 6, "evaluation": {"every": 2}, "lora": {"rank": 4}}


def weights(run: Path) -> list[dict[str, Any]]:
    folder = max((run / "checkpoints").glob("step-*"))
    return [load_file(folder / f"{i}.safetensors") for i in range(2)]


def test_a_run_on_workers_ends_with_the_weights_of_a_local_one(
    ray_runtime: str, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Smaller ones blow up the rounding errors of gradients that are nearly zero.
    monkeypatch.setattr("cotune.trainer.learner.memory.optimizer.EPS", RUN_EPS)
    monkeypatch.setattr("cotune.trainer.learner.fsdp.learner.RANK", "tests.trainer.learner.fsdp_ranks:FineRank")
    traced(tmp_path / "records")
    settings = {"recipe": "sft", "records": str(tmp_path / "records"), **STEPS}
    for name, more in (("local", {}), ("cluster", {"cluster": CLUSTER})):
        summary = trainer(application(converse), None, to=name, **settings, **more)
        assert summary.finished and summary.versions == {"first": 3, "second": 3}
    one, other = weights(tmp_path / "local"), weights(tmp_path / "cluster")
    for own, theirs in zip(one, other, strict=True):
        assert own.keys() == theirs.keys()
        for name in own:
            np.testing.assert_allclose(own[name], theirs[name], atol=1e-5)
    figures = [[line["policies"] for line in trainer.metrics(name)] for name in ("local", "cluster")]
    for own, theirs in zip(*figures, strict=True):
        for policy in ("first", "second"):
            for name in {"loss", "held_out_loss", "grad_norm"} & own[policy].keys():
                assert own[policy][name] == pytest.approx(theirs[policy][name], rel=1e-3, abs=1e-5)


@pytest.mark.long  # `test_critic.py` of the learner compares two workers with one, `test_sweet_rl.py` runs the recipe
def test_a_critic_on_workers_gives_the_advantages_of_a_local_one(
    ray_runtime: str, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotune.trainer.learner.memory.optimizer.EPS", RUN_EPS)
    monkeypatch.setattr("cotune.trainer.learner.fsdp.learner.RANK", "tests.trainer.learner.fsdp_ranks:FineRank")
    recorded_team(tmp_path / "records", letters="abc")
    settings = {"recipe": "sweet_rl", "records": str(tmp_path / "records"), "steps": 1, "tasks_per_step": 6}
    scores: list[dict[str, float]] = []
    for name, more in (("local", {}), ("cluster", {"cluster": CLUSTER})):
        assert trainer(application(writer), None, to=name, **settings, **more).finished
        scores.append(load_labels(tmp_path / name / "turn_advantages.jsonl"))
    local, cluster = scores
    assert max(map(abs, local.values())) > 0.01
    assert cluster == pytest.approx(local, abs=1e-4)
