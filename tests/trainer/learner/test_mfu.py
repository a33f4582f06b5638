"""What share of a GPU an update has used."""

from __future__ import annotations

import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.records.policies import policies_for
from cotune.trainer.learner.gpu_rates import rates_of
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.mfu import floating_point_operations, model_utilization
from tests.trainer.learner.learner_rows import FAST, SMALL, make_rows


def test_operations_of_a_step_in_numbers() -> None:
    assert floating_point_operations(100, 10, all_trained=True) == 6000
    assert floating_point_operations(100, 10, all_trained=False) == 4000


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("NVIDIA H100 PCIe", (756e12, 2000e9)),
        ("NVIDIA H100 80GB HBM3", (989e12, 3350e9)),
        ("NVIDIA A100-SXM4-80GB", (312e12, 2039e9)),
        ("NVIDIA A100-SXM4-40GB", (312e12, 1555e9)),
        ("NVIDIA L40", (181e12, 864e9)),
        ("NVIDIA L40S", (362e12, 864e9)),
        ("NVIDIA RTX A1000", None),
        ("Tesla K80", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, rates: tuple[float, float] | None) -> None:
    assert rates_of(name) == rates


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
