"""What share of a GPU an update has used."""

from __future__ import annotations

import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.mfu import model_utilization, operations, peak_of
from tests.trainer.learner.learner_rows import FAST, SMALL, make_rows


def test_operations_of_a_step_in_numbers() -> None:
    assert operations(100, 10, all_trained=True) == 6000
    assert operations(100, 10, all_trained=False) == 4000
    assert (peak_of("NVIDIA H100 PCIe"), peak_of("NVIDIA A100-SXM4-80GB")) == (756e12, 312e12)
    assert peak_of("NVIDIA L40") == 181e12
    assert (peak_of("NVIDIA RTX A1000"), peak_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb")) == (None, None)
    assert (peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA L40S"), peak_of("Tesla K80")) == (989e12, 362e12, None)


def test_it_is_of_layers_and_of_a_known_gpu_alone(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = LocalLearner.open(base, policies_for("full", ["a"], SMALL), FAST, LossSpec())
    assert "mfu" not in learner.update("a", make_rows())
    model = learner._policies["a"]
    layers = sum(p.numel() for name, p in model.network.named_parameters() if "embed" not in name)
    monkeypatch.setattr(type(model), "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert model_utilization(model, 1000, 0.5) == {"mfu": pytest.approx(6 * layers * 1000 / 0.5 / 989e12)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GeForce GT 210")
    assert model_utilization(model, 1000, 0.5) == {}
