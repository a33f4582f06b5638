"""A run on Ray: the loop with engines, learners and rollout workers in actors, what it survives, what it leaves."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.export import export_run
from cotune.errors import ConfigError, LearnerLost
from cotune.integrations.ray_runtime import RayRuntime
from cotune.sqlite_store import SqliteStore
from cotune.trainer.fsdp_learner import FsdpLearner
from cotune.trainer.run_folder import read_metrics
from tests.trainer import chaos, worker_app
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS, application, letters

ROOT = Path(__file__).parents[2]
CLUSTER = {"address": "local", "engine": "transformers", "learners": 2, "rollout_workers": 2}
SETTINGS = {"policies": "full", "plan": {"k": 8}, "learner": {"lr": 5e-3, "mini_batch": 8}, "alpha": 0.0}


@pytest.fixture
def learners(monkeypatch: pytest.MonkeyPatch) -> list[FsdpLearner]:
    """The learners that runs open, to be broken."""
    opened: list[FsdpLearner] = []
    original = FsdpLearner.open

    def remember(*args: Any, **settings: Any) -> FsdpLearner:
        opened.append(original(*args, **settings))
        return opened[-1]

    monkeypatch.setattr("cotune.trainer.cluster.FsdpLearner.open", remember)
    return opened


def when(moment: Callable[[], bool], deed: Callable[[], None]) -> threading.Thread:
    """Do something once, when the moment has come."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while not moment() and time.monotonic() < deadline:
            time.sleep(0.01)
        deed()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def steps_of(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run))


def test_reward_rises_and_the_export_is_as_ever(ray_runtime: RayRuntime, trainer: Trainer) -> None:
    summary = trainer(worker_app.solve, steps=6, cluster=CLUSTER, **SETTINGS)
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


def test_mode_async_on_ray(ray_runtime: RayRuntime, trainer: Trainer) -> None:
    summary = trainer(worker_app.solve, steps=5, mode="async", cluster={**CLUSTER, "learners": 1}, **SETTINGS)
    assert summary.finished
    assert [set(line["staleness"]) for line in trainer.metrics()] == [{"0"}, *[{"1"}] * 4]
    assert not any("stale_version" in line["left_out"] for line in trainer.metrics())


def test_a_learner_lost_between_two_publishes_goes_on_from_the_last_checkpoint(
    ray_runtime: RayRuntime, trainer: Trainer, learners: list[FsdpLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original, asked = trainer.folder / "run", FsdpLearner.weights, itertools.count()

    def weights(learner: FsdpLearner, policy: str) -> Any:
        if next(asked) == 5:  # the second policy of the third step
            os.kill(learners[0]._pools[0].gang.processes[1], signal.SIGKILL)
        return original(learner, policy)

    monkeypatch.setattr(FsdpLearner, "weights", weights)
    summary = trainer(worker_app.solve, steps=6, cluster=CLUSTER, **SETTINGS)
    assert summary.finished
    assert [line["step"] for line in trainer.metrics()] == list(range(6))
    assert trainer.said.count("Restarting it from the last checkpoint (1 of 3)") == 1
    store = SqliteStore.open(run / "records.db")
    consumed = Counter(store.consumed().values())
    store.close()
    assert consumed == {line["step"]: line["groups"] for line in trainer.metrics()}


def test_learners_that_are_lost_too_often_end_the_run_and_it_can_be_resumed(
    ray_runtime: RayRuntime, trainer: Trainer, learners: list[FsdpLearner]
) -> None:
    run = trainer.folder / "run"
    killer = when(
        lambda: len(steps_of(run)) >= 1, lambda: os.kill(learners[0]._pools[0].gang.processes[0], signal.SIGKILL)
    )
    cluster = {**CLUSTER, "learner_restarts": 0}
    with pytest.raises(LearnerLost, match=r"cluster.learner_restarts is 0.*--resume"):
        trainer(worker_app.solve, steps=3, cluster=cluster, **SETTINGS)
    killer.join()
    assert trainer.resume(worker_app.solve).finished
    assert [line["step"] for line in trainer.metrics()] == list(range(3))


@pytest.mark.parametrize(("fault", "counter"), [("garbage", "garbage"), ("hang", "unhealthy")])
def test_an_engine_that_breaks_is_replaced_and_the_run_does_not_notice(
    ray_runtime: RayRuntime, trainer: Trainer, fault: str, counter: str
) -> None:
    engine = {"engine": "tests.trainer.odd_engine:open", "engines": 2, "engine_timeout": 5.0}
    arguments = {"fault": fault, "marker": str(trainer.folder / "first")}
    cluster = {"address": "local", **engine, "engine_args": arguments}
    summary = trainer(worker_app.solve, steps=5, cluster=cluster, **SETTINGS)
    lines = trainer.metrics()
    counted = Counter[str]()
    for line in lines:
        counted.update(line["counters"])
        assert line["failed"] == 0 and set(line["staleness"]) == {"0"}
        assert line["rows"] + sum(line["left_out"].values()) == line["candidates"]
    assert summary.finished and counted[counter] >= 1 and counted["restarts"] == 1
    assert counted["retried"] >= 1 and not counted["failed"]


@pytest.mark.parametrize("engine", ["sglang", "tests.trainer.odd_engine:missing"])
def test_an_engine_that_does_not_exist_is_refused(ray_runtime: RayRuntime, trainer: Trainer, engine: str) -> None:
    with pytest.raises(ConfigError, match=engine):
        trainer(worker_app.solve, cluster={**CLUSTER, "engine": engine}, **SETTINGS)


def test_a_workflow_without_an_import_path_is_refused_before_work(ray_runtime: RayRuntime, trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="import by module and name"):
        trainer(application(first=letters, second=letters), cluster=CLUSTER, **SETTINGS)


def test_full_weights_in_vllm_are_refused_in_mode_async(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="it holds one version only"):
        trainer(worker_app.solve, cluster={**CLUSTER, "engine": "vllm"}, policies="full", mode="async")


def test_stopped_runs_leave_nothing_and_can_go_on(tiny_base: Path, tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    runs = {number: launched(tiny_base, tmp_path, number.name) for number in (signal.SIGTERM, signal.SIGINT)}
    families = []
    for number, run in runs.items():
        deadline = time.monotonic() + 200
        while len(steps_of(tmp_path / number.name)) < 2 and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        families.append(chaos.family(run.pid))
        if number == signal.SIGINT:
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
    for number, run in runs.items():
        code, said = run.wait(120), (tmp_path / f"{number.name}.log").read_text()
        assert code == 130, said
        assert "Go on with: --resume" in said
        assert len(steps_of(tmp_path / number.name)) >= 2
    for family in families:
        assert len(family) > 5
        assert chaos.survivors(family, 10.0) == []
    assert {path.name for path in Path("/dev/shm").iterdir()} - before == set()


def launched(base: Path, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A run of many steps in a process of its own."""
    settings = [f"--set=cluster.{k}={json.dumps(v)}" for k, v in CLUSTER.items()]
    command = [sys.executable, "-m", "cotune.cli", "train", "tests.trainer.worker_app:solve"]
    command += ["--tasks", str(folder / "tasks.jsonl"), "--model", str(base), "--out", str(folder / name)]
    command += ["--policies", "full", "--steps", "100", "--tasks-per-step", "3", "--lr", "5e-3", *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
