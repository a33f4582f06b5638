"""A run computes in bfloat16 where the processor has it, if sampler and learner agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cotune.integrations.models import bfloat16
from cotune.reading.facts import troubles
from cotune.reading.run import OpenedRun
from cotune.trainer.run import open_run
from cotune.trainer.run.checkpoint import load_checkpoint
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask, letters

pytestmark = pytest.mark.skipif(not bfloat16.has_bfloat16(), reason="this processor does not multiply bfloat16")


AUTO = {"dtype": "auto"}


async def one_call(task):
    return (await ask("first", f"say {task['letter']}")).count(task["letter"]) / 4


def weights(run: Path) -> dict[str, np.ndarray]:
    found = load_checkpoint(run / "checkpoints")
    assert found is not None
    return load_file(found[1] / "0.safetensors")


def test_in_bfloat16_where_both_agree_and_to_the_bit_when_resumed(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bfloat16, "LARGE", 1)
    app = application(one_call, first=letters)
    trainer(app, policies="lora", steps=2, to="whole", learner=AUTO)
    said = " ".join(trainer.said.split())
    assert "matrix products in bfloat16: sampler and learner differ by" in said
    assert 1e-5 < trainer.metrics("whole")[0]["policies"]["first"]["sampler_gap_mean"] < 0.05
    trainer(app, policies="lora", steps=1, to="parts", learner=AUTO)
    monkeypatch.setattr(bfloat16, "LARGE", 10**9)  # what this machine would choose is float32
    trainer.resume(app, to="parts", steps=2)
    assert "matrix products in bfloat16, as when the run began" in " ".join(trainer.said.split())
    expected = weights(trainer.folder / "whole")
    assert all(np.array_equal(array, expected[name]) for name, array in weights(trainer.folder / "parts").items())


def test_in_float32_where_the_gap_is_above_its_bound(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def far_apart(*parts: object) -> float:
        return 0.2

    monkeypatch.setattr(bfloat16, "LARGE", 1)
    monkeypatch.setattr(open_run, "largest_gap", far_apart)
    app = application(one_call, first=letters)
    trainer(app, policies="lora", steps=1, probe_bound=0.1, learner=AUTO)
    said = " ".join(trainer.said.split())
    assert "warning: in float32, as in bfloat16 sampler and learner differ by 0.2 nats a token (probe_bound is" in said
    assert trainer.metrics()[0]["policies"]["first"]["sampler_gap_mean"] < 1e-5
    assert trainer.metrics()[0]["policies"]["first"]["probe_gap_mean"] < 1e-5
    with OpenedRun(trainer.folder / "run") as run:
        found = [(one.text, one.count) for one in troubles(run) if one.kind == "precision"]
    assert found == [("in float32, as sampler and learner differed in bfloat16 by 0.2 nats a token", 1)]
    trainer.resume(app, steps=2)  # the gap is not asked again
    assert "matrix products in float32, as when the run began" in " ".join(trainer.said.split())
    assert trainer.metrics()[1]["policies"]["first"]["sampler_gap_mean"] < 1e-5
