"""A run on Ray: the loop with engines, learners and rollout workers in actors, and what of them it survives."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
from collections import Counter
from typing import Any

import pytest

from cotune.adapters.export import export_run
from cotune.errors import ConfigError, LearnerLost
from cotune.trainer.learner.fsdp.learner import FsdpLearner
from tests.trainer import chaos, worker_app
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, letters
from tests.trainer.tiny_run import audit

pytestmark = pytest.mark.slow

CLUSTER = {"address": "local", "learners": 2, "rollout_workers": 2}
SETTINGS = {
    "engine": "transformers",
    "policies": "full",
    "plan": {"k": 8},
    "learner": {"lr": 5e-3, "mini_batch": 8},
    "rewards": {"team_weight": 0.0},
}


@pytest.fixture
def learners(monkeypatch: pytest.MonkeyPatch) -> list[FsdpLearner]:
    """The learners that runs open, to be broken."""
    opened: list[FsdpLearner] = []
    original = FsdpLearner.open

    def remember(*args: Any, **settings: Any) -> FsdpLearner:
        opened.append(original(*args, **settings))
        return opened[-1]

    monkeypatch.setattr("cotune.trainer.opening.cluster.FsdpLearner.open", remember)
    return opened


def test_reward_rises_and_the_export_is_as_ever(ray_runtime: str, trainer: Trainer) -> None:
    summary = trainer(worker_app.solve, steps=6, profile=True, cluster=CLUSTER, **SETTINGS)
    lines = trainer.metrics()
    assert summary.finished and summary.lost_records == 0
    for role in ("first", "second"):
        assert lines[-1]["roles"][role]["reward"] > lines[0]["roles"][role]["reward"] + 0.2
        assert max(line["roles"][role]["sampler_gap_mean"] for line in lines) < 1e-4
    for line in lines:
        assert line["rows"] + sum(line["left_out"].values()) == line["candidates"]
        assert set(line["staleness"]) == {"0"}
        assert line["counters"]["answered"] >= line["calls"]
        assert not {"retried", "restarts", "failed"} & line["counters"].keys()
    manifest = export_run(trainer.folder / "run", trainer.folder / "export")
    assert sorted(entry.role for entry in manifest.roles) == ["first", "second"]
    with gzip.open(trainer.folder / "run" / "profile" / "step-000002.trace.json.gz", "rt") as trace:
        events = json.load(trace)["traceEvents"]
    processes = {event["pid"] for event in events if event["name"] == "Optimizer.step#AdamW.step"}
    assert len(processes) == 1 and os.getpid() not in processes, "rank 0 alone is traced, in its own process"


@pytest.mark.long
def test_mode_async_on_ray(ray_runtime: str, trainer: Trainer) -> None:
    summary = trainer(
        worker_app.solve, steps=3, mode="async", cluster={**CLUSTER, "learners": 1, "rollout_workers": 1}, **SETTINGS
    )
    assert summary.finished
    assert [set(line["staleness"]) for line in trainer.metrics()] == [{"0"}, *[{"1"}] * 2]
    assert not any("stale_version" in line["left_out"] for line in trainer.metrics())


def test_a_lost_learner_goes_on_from_the_last_checkpoint_and_one_lost_too_often_ends_the_run(
    ray_runtime: str, trainer: Trainer, learners: list[FsdpLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original, asked = trainer.folder / "run", FsdpLearner.weights, itertools.count()
    killed: list[int] = []

    def kill(rank: int) -> None:
        os.kill(learners[-1]._ranks.workers.processes[rank], signal.SIGKILL)
        killed.append(rank)

    def weights(learner: FsdpLearner, policy: str) -> Any:
        if next(asked) == 3:  # the second policy of the second step, whose first one is published
            kill(1)
        if killed == [1] and chaos.steps_done(run) == 2:
            kill(0)
        return original(learner, policy)

    monkeypatch.setattr(FsdpLearner, "weights", weights)
    monkeypatch.setattr("cotune.trainer.opening.restore.LEARNER_RESTARTS", 1)
    cluster = {**CLUSTER, "rollout_workers": 1}
    with pytest.raises(LearnerLost, match=r"restarted 1 times before.*--resume"):
        trainer(worker_app.solve, steps=3, cluster=cluster, **SETTINGS)
    assert trainer.said.count("Restarting it from the last checkpoint (1 of 1)") == 1
    # Without Ray, which saves the start of four actors; `test_cluster_faults.py` resumes on Ray.
    assert trainer.resume(worker_app.solve, cluster={"address": "none", "learners": 1}).finished
    assert audit(run, 3) == (0, 0, 0)


def test_engines_that_break_are_replaced_and_the_run_does_not_notice(
    ray_runtime: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotune.trainer.run.engines._ROUTER", "tests.trainer.odd_engine:open_router")
    cluster = {"address": "local", "engines": 3}
    engine = {"engine": "tests.trainer.odd_engine:open", "engine_args": {"markers": str(trainer.folder)}}
    summary = trainer(worker_app.solve, steps=5, cluster=cluster, **{**SETTINGS, **engine})
    lines = trainer.metrics()
    counted = Counter[str]()
    for line in lines:
        counted.update(line["counters"])
        assert line["failed"] == 0 and set(line["staleness"]) == {"0"}
        assert line["rows"] + sum(line["left_out"].values()) == line["candidates"]
    assert summary.finished and counted["garbage"] >= 1 and counted["unhealthy"] >= 1
    assert counted["restarts"] >= 2 and counted["retried"] >= 2 and not counted["failed"]  # more where all is slow


@pytest.mark.parametrize("engine", ["sglang", "tests.trainer.odd_engine:missing"])
def test_an_engine_that_does_not_exist_is_refused(ray_runtime: str, trainer: Trainer, engine: str) -> None:
    with pytest.raises(ConfigError, match=engine):
        trainer(worker_app.solve, cluster=CLUSTER, **{**SETTINGS, "engine": engine})


def test_a_workflow_without_an_import_path_is_refused_before_work(ray_runtime: str, trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="cannot be imported by rollout workers"):
        trainer(application(first=letters, second=letters), cluster=CLUSTER, **SETTINGS)


@pytest.mark.long  # `test_vllm_full_weights.py` has an engine and a learner that dies, the test above a run and one
@pytest.mark.timeout(900)
def test_full_weights_of_a_learner_that_is_killed_while_it_publishes_go_to_vllm_by_files(
    ray_runtime: str, trainer: Trainer, learners: list[FsdpLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, asked = FsdpLearner.weights, itertools.count(1)

    def weights(learner: FsdpLearner, policy: str) -> Any:
        gathered = original(learner, policy)
        if next(asked) == 3:  # in the third step
            os.kill(learners[-1]._ranks.workers.processes[0], signal.SIGKILL)
        return gathered

    monkeypatch.setattr(FsdpLearner, "weights", weights)
    policy = [{"name": "both", "roles": ["first", "second"], "kind": "full"}]
    settings = {name: value for name, value in SETTINGS.items() if name not in ("policies", "engine")}
    cluster = {**CLUSTER, "rollout_workers": 1}
    assert trainer(worker_app.solve, steps=3, engine="vllm", policy=policy, cluster=cluster, **settings).finished
    assert trainer.said.count("Restarting it from the last checkpoint (1 of 3)") == 1
    assert [line["counters"].get("published_by_files", 0) for line in trainer.metrics()] == [0, 0, 1]
    assert audit(trainer.folder / "run", 3) == (0, 0, 0)


def test_full_weights_in_vllm_are_refused_in_mode_async(ray_runtime: str, trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="it holds one version only"):
        trainer(worker_app.solve, cluster=CLUSTER, engine="vllm", policies="full", mode="async")
