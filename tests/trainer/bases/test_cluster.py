"""Two base models on Ray: engines and learners for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.export import latest_policies
from cotune.sampling.protocol import fingerprint
from tests.trainer import worker_app
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_run import audit

pytestmark = pytest.mark.slow

CLUSTER = {"address": "local", "learners": 2}
SETTINGS: dict[str, Any] = {
    "engine": "transformers",
    "plan": {"k": 4},
    "learner": {"lr": 5e-3, "mini_batch": 8},
    "rewards": {"team_weight": 0.0},
}


@pytest.mark.long  # `test_training.py` trains two bases in one process, and `run/test_cluster.py` one on Ray
def test_a_run_on_ray_trains_what_one_process_does(ray_runtime: str, trainer: Trainer, other_base: Path) -> None:
    policy = [{"name": "one", "roles": ["first"]}, {"name": "two", "roles": ["second"], "model": str(other_base)}]
    assert trainer(worker_app.parity, policy=policy, cluster={**CLUSTER, "learners": 1}, **SETTINGS).finished
    assert trainer.said.count("starting 1 transformers engine for") == 2
    here = Trainer(trainer.folder / "here", trainer.base)
    here.folder.mkdir()
    assert here(worker_app.parity, policy=policy, **SETTINGS).finished
    for line, same in zip(trainer.metrics(), here.metrics(), strict=True):
        assert line["rows"] == same["rows"]
        for name, found in line["policies"].items():
            assert found["sampler_gap_max"] < 1e-4
            assert found["loss"] == pytest.approx(same["policies"][name]["loss"], abs=1e-4)
    assert audit(trainer.folder / "run", 2) == (0, 0, 0)
    one, two = latest_policies(trainer.folder / "run")
    assert one.version == two.version == 2 and fingerprint(one.weights or {}) != fingerprint(two.weights or {})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_vllm_engine_serves_each_base(ray_runtime: str, trainer: Trainer, other_base: Path) -> None:
    policy = [{"name": "one", "roles": ["first"]}, {"name": "two", "roles": ["second"], "model": str(other_base)}]
    assert trainer(worker_app.parity, policy=policy, cluster=CLUSTER, **{**SETTINGS, "engine": "vllm"}).finished
    assert trainer.said.count("starting 1 vllm engine for") == 2
    gaps = [found["sampler_gap_max"] for line in trainer.metrics() for found in line["policies"].values()]
    assert len(gaps) == 2 * len(trainer.metrics()) and max(gaps) < 0.02
    assert audit(trainer.folder / "run", 2) == (0, 0, 0)
    assert [policy.version for policy in latest_policies(trainer.folder / "run")] == [2, 2]
