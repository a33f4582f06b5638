"""Smaller optimizer states and weights: refused without a GPU before work starts, and kept in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cotune
from cotune.algorithms.recipes import LossSpec
from cotune.errors import ConfigError
from cotune.policies import policies_for
from cotune.trainer.config.train import convert
from cotune.trainer.learner import files
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory.optimizer import build_optimizer, check_hardware
from cotune.trainer.learner.policy_model import PolicyModel
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows


@pytest.mark.parametrize(
    ("field", "value", "usual"), [("optimizer", "adamw8bit", "adamw"), ("quantize", "4bit", "none")]
)
def test_a_machine_without_a_gpu_is_told_before_work_starts(
    base: str, tmp_path: Path, field: str, value: str, usual: str
) -> None:
    @cotune.workflow
    def solve(task: object) -> float:
        raise AssertionError("work has started")

    said = rf"learner\.{field} = '{value}': allowed is {usual}, where there is no GPU\. Leave it out, or train on a GPU"
    with pytest.raises(ConfigError, match=said):
        cotune.train(solve, [{"q": 1}], {"model": base, "learner": {field: value}}, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=rf"learner\.{field} = '{value}': allowed is {usual} on a cluster"):
        convert({"model": base, "learner": {field: value}, "cluster": {"address": "local"}})


def test_four_bits_are_of_weights_that_are_not_trained() -> None:
    with pytest.raises(ConfigError, match=r"quantize = '4bit': allowed is none, where all weights are trained"):
        convert({"model": "m", "policies": "full", "learner": {"quantize": "4bit"}})
    assert convert({"model": "m", "learner": {"quantize": "4bit"}}).learner.quantize == "4bit"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"given with bitsandbytes\. pip install 'cotune\[quantize\]'"):
        check_hardware(change(FAST, device="cuda", optimizer="adamw8bit"))


def test_moments_of_eight_bits_are_checkpointed(base: str, tmp_path: Path) -> None:
    """bitsandbytes also computes on a CPU, if slowly."""
    learner = LocalLearner.open(base, policies_for("full", ["a"], SMALL), FAST, LossSpec())
    model = learner._policies["a"]
    optimizer = build_optimizer(model, change(FAST, optimizer="adamw8bit"))

    def step(optimizer: torch.optim.Optimizer) -> None:
        model.token_logprobs(make_rows())[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(optimizer)
    head = model.parameters()["model.layers.0.mlp.up_proj.weight"]
    moments = optimizer.state[head]
    assert moments["state1"].dtype == torch.uint8  # 6,144 entries; fewer than 4,096 stay fp32
    files.write_optimizer(tmp_path, model, optimizer)
    again = build_optimizer(model, change(FAST, optimizer="adamw8bit"))
    files.read_optimizer(tmp_path, model, again)
    for name, value in moments.items():
        assert torch.equal(torch.as_tensor(again.state[head][name]), torch.as_tensor(value)), name
    start = {name: p.detach().clone() for name, p in model.parameters().items()}
    step(optimizer)
    expected = _moved(model, start)
    step(again)
    found = _moved(model, start)
    for name, moved in expected.items():
        torch.testing.assert_close(found[name], moved)


def _moved(model: PolicyModel, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """How far each parameter has gone, which is put back."""
    found = {name: p.detach() - start[name] for name, p in model.parameters().items()}
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            parameter.copy_(start[name])
    return found
