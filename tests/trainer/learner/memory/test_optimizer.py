"""Smaller optimizer states and weights: refused without a GPU before work starts, and kept in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cotune
from cotune.algorithms.recipes import LossSpec
from cotune.errors import ConfigError
from cotune.records.policies import policies_for
from cotune.trainer.config.load import convert
from cotune.trainer.learner import files
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory.optimizer import check_hardware
from tests.trainer.learner.learner_rows import FAST, SMALL, change


@pytest.mark.parametrize(
    ("field", "value", "usual"),
    [("optimizer", "adamw8bit", "adamw"), ("quantize", "4bit", "none")],
)
def test_a_machine_without_a_gpu_is_told_before_work_starts(
    base: str, tmp_path: Path, field: str, value: str, usual: str
) -> None:
    @cotune.workflow
    def solve(task: object) -> float:
        raise AssertionError("work has started")

    said = rf"learner\.{field} = '{value}' needs a GPU\. Use {usual}, or train on a GPU"
    with pytest.raises(ConfigError, match=said):
        cotune.train(solve, [{"q": 1}], {"model": base, "learner": {field: value}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "value", "usual"), [("optimizer", "adamw8bit", "adamw"), ("quantize", "4bit", "none")]
)
def test_what_bitsandbytes_does_is_of_one_process(field: str, value: str, usual: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"learner\.{field} = '{value}' cannot be used on a cluster.* set it to {usual}"
    ):
        convert({"model": "m", "learner": {field: value}, "cluster": {"address": "local"}})


def test_four_bits_are_of_weights_that_are_not_trained() -> None:
    with pytest.raises(ConfigError, match=r"quantize = '4bit' cannot be used if all weights are trained"):
        convert({"model": "m", "policies": "full", "learner": {"quantize": "4bit"}})
    assert convert({"model": "m", "learner": {"quantize": "4bit"}}).learner.quantize == "4bit"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(
        ConfigError, match=r"needs bitsandbytes\. In cotune's source folder, run: pip install -e '\.\[quantize\]'"
    ):
        check_hardware(change(FAST, device="cuda", optimizer="adamw8bit"))


class Blocks(torch.optim.Optimizer):
    """A state in the form of bitsandbytes' AdamW8bit, which a machine without a GPU need not have: moments of bytes,
    tables that all parameters share, and a step that is a number."""

    table = torch.linspace(-1, 1, 256)

    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            for moment in ("1", "2"):
                state["state" + moment] = torch.randint(256, parameter.shape, dtype=torch.uint8)
                state["absmax" + moment] = torch.rand(4)
                state["qmap" + moment] = self.table


def test_moments_of_eight_bits_are_checkpointed(base: str, tmp_path: Path) -> None:
    model = LocalLearner.open(base, policies_for("full", ["a"], SMALL), FAST, LossSpec())._policies["a"]
    parameters = model.parameters()
    optimizer, again = (Blocks(list(parameters.values()), {}) for _ in range(2))
    files.write_optimizer(tmp_path, model, optimizer)  # before the first step
    files.read_optimizer(tmp_path, model, again)
    assert not again.state
    optimizer.step()
    optimizer.step()
    files.write_optimizer(tmp_path, model, optimizer)
    files.read_optimizer(tmp_path, model, again)
    for parameter in parameters.values():
        found, expected = again.state[parameter], optimizer.state[parameter]
        assert found.keys() == expected.keys() and found["step"] == 2 and isinstance(found["step"], int)
        assert all(torch.equal(found[name], expected[name]) for name in expected if name != "step")
