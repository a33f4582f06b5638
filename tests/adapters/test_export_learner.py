"""From a learner's checkpoint to an export: the weights on disk compute what the learner computes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cotune.adapters.export import export_run
from cotune.algorithms.catalogue import RECIPES
from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.records.policies import LoraSpec, policies_for
from cotune.sampling.protocol import fingerprint
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.run.checkpoint import Checkpoint, save_checkpoint

ROWS = [
    TrainRow(
        id=f"{i}",
        role="planner",
        prompt_ids=(5, 6, 7),
        response_ids=(8 + i, 9, 10),
        logprobs=(-5.5, -5.5, -5.5),
        advantage=1.0 - 2 * i,
    )
    for i in range(2)
]


@pytest.mark.parametrize("layout", ["lora", "full"])
def test_an_exported_checkpoint_computes_what_the_learner_does(layout: str, base: Path, tmp_path: Path) -> None:
    policies = policies_for(layout, ["planner", "writer"], LoraSpec(rank=4, alpha=8.0))
    settings = LearnerSettings(lr=1e-2)
    learner = LocalLearner.open(str(base), policies, settings, RECIPES["at_grpo"].loss)
    for _ in range(3):
        learner.update("planner", ROWS)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_bytes(msgspec.json.encode({"id": "r", "model": str(base)}))
    checkpoint = Checkpoint(steps=3, versions={"planner": 3, "writer": 0}, policies=policies, run="r")
    save_checkpoint(run / "checkpoints", checkpoint, learner)

    manifest = export_run(run, tmp_path / "out")

    planner, writer = manifest.policies
    assert (planner.version, writer.version) == (3, 0)
    assert planner.fingerprint == fingerprint(learner.weights("planner"))
    assert writer.fingerprint == fingerprint(learner.weights("writer"))
    assert planner.fingerprint != writer.fingerprint
    trained = _load(base, tmp_path / "out" / "planner", layout)
    expected = learner.logprobs("planner", ROWS)
    for row, logprobs in zip(ROWS, expected, strict=True):
        np.testing.assert_allclose(_logprobs(trained, row), logprobs, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert np.abs(_logprobs(plain, ROWS[0]) - expected[0]).max() > 1e-2


def _load(base: Path, folder: Path, layout: str) -> torch.nn.Module:
    if layout == "full":
        return AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


def _logprobs(model: torch.nn.Module, row: TrainRow) -> np.ndarray:
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    with torch.no_grad():
        scores = model(ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
    return scores.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0].numpy()
