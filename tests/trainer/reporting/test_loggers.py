"""Curves elsewhere: what TensorBoard, MLflow and W&B hold of a run, and what a tool that fails costs."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.trainer.reporting.loggers import tracker_figures, without_secrets
from tests.trainer.conftest import Trainer
from tests.trainer.rollout.test_workers import wait_until
from tests.trainer.tiny_app import application, letters

ROLES = ("first", "second")
APP = application(first=letters, second=letters)

ALL = ["tensorboard", "mlflow", "wandb"]


@pytest.fixture(autouse=True)
def tools_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{tmp_path}/mlflow.db")


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def in_mlflow(folder: Path, query: str) -> list[Any]:
    with sqlite3.connect(folder / "mlflow.db") as database:
        return database.execute(query).fetchall()


@pytest.mark.slow
def test_each_tool_has_every_step_and_a_resumed_run_goes_on_in_its_curve(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trainer.folder)
    monkeypatch.setattr("cotune.trainer.reporting.loggers._END_SECONDS", 300.0)  # MLflow lays out its database
    run = trainer.folder / "run"
    trainer(APP, loggers=ALL, project="letters", steps=1)
    trainer.resume(APP, steps=2)
    wanted = [step["candidate_reward"] for step in trainer.metrics()]
    assert "logger" not in trainer.said

    curves = scalars(run)
    assert [step for step, _ in curves["step/candidate_reward"]] == [1, 2]
    assert [value for _, value in curves["step/candidate_reward"]] == pytest.approx(wanted)
    assert set(trainer.metrics()[0]["roles"]) == {n.split("/")[1] for n in curves if n.startswith("roles/")}

    first = sorted(curves)[:6]
    assert first == [f"1_main/{title}/{role}" for title in ("2_reward", "3_entropy", "4_sampler_gap") for role in ROLES]

    (experiment, name), *more = in_mlflow(
        trainer.folder, "SELECT e.name, r.name FROM runs r JOIN experiments e USING (experiment_id)"
    )
    assert (experiment, name, more) == ("letters", "run", [])
    rewards = in_mlflow(
        trainer.folder, "SELECT step, value FROM metrics WHERE key = 'step/candidate_reward' ORDER BY step"
    )
    assert rewards == [(1, pytest.approx(wanted[0])), (2, pytest.approx(wanted[1]))]
    assert dict(in_mlflow(trainer.folder, "SELECT key, value FROM params"))["learner.lr"] == "0.003"
    assert dict(in_mlflow(trainer.folder, "SELECT key, value FROM params"))["model"] == trainer.base.name

    offline = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(offline) == 2
    assert len({file.name for file in offline}) == 1, "both parts have the run's one id"
    assert set(json.loads((run / "loggers.json").read_text())) == set(ALL)

    assert main(["export", "run", "--out", "adapters"]) == 0
    said = capsys.readouterr().out
    assert "stored in mlflow as an artefact of the run" in said and "stored in wandb" in said, said
    kept = {file.name for file in (trainer.folder / "mlruns").rglob("export/*")}
    assert "roles.json" in kept, kept
    (sent,) = {*(run / "wandb").glob("offline-run-*/run-*.wandb")} - {*offline}
    wait_until(lambda: b"roles.json" in sent.read_bytes())  # W&B's own process writes it, after the command perhaps


def test_trackio_keeps_the_settings_of_a_resumed_run_and_its_own_names(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackio itself would serve a page: what it is asked for is kept here."""
    parts: list[Any] = []
    logged: list[tuple[int, dict[str, float]]] = []

    def init(project: str, name: str, resume: str) -> Any:
        log = lambda values, step: logged.append((step, values))  # noqa: E731
        parts.append(SimpleNamespace(project=project, name=name, config={}, log=log, finish=lambda: None))
        return parts[-1]

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    monkeypatch.setattr("cotune.integrations.exchange.trackers.tracker.find_spec", lambda name: True)
    trainer(APP, loggers=["trackio"], project="letters", steps=1)
    trainer.resume(APP, steps=2)
    assert "logger" not in trainer.said
    first, second = parts
    assert (first.project, first.name) == (second.project, second.name) and first.name.startswith("run-")
    assert [part.config["learner.lr"] for part in parts] == [0.003, 0.003] and "allow_val_change" not in first.config
    assert [step for step, _ in logged] == [1, 2] and all("step" not in values for _, values in logged)


@pytest.mark.parametrize(("retries", "why"), [("0", "MlflowException: "), ("7", "it did not answer within 1 s")])
def test_a_tool_that_cannot_be_reached_costs_no_step(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, retries: str, why: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", retries)
    if why.startswith("it did not"):
        monkeypatch.setattr("cotune.trainer.reporting.loggers._END_SECONDS", 1.0)
    summary = trainer(APP, loggers=["mlflow", "tensorboard"])
    assert summary.finished
    assert f"logger mlflow: 2 of 2 steps did not arrive ({why}" in trainer.said.replace("\n", " ")
    assert "logger tensorboard" not in trainer.said
    assert [step for step, _ in scalars(trainer.folder / "run")["step/rows"]] == [1, 2]


def test_tools_are_named_before_work_starts(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"loggers.*'neptune'.*tensorboard"):
        trainer(APP, loggers=["neptune"])
    monkeypatch.setattr("cotune.integrations.exchange.trackers.tracker.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install trackio"):
        trainer(APP, loggers=["trackio"])
    assert not (trainer.folder / "run").exists()


def test_the_figures_that_say_most_stand_first_and_a_setting_tells_no_path_or_password() -> None:
    roles = {"planner": {"reward": 0.5, "entropy": 1.0, "sampler_gap_mean": 0.01}}
    found = tracker_figures({"calls": 3, "held_out": {"success": 0.25}, "roles": roles, "seconds": {"update": 2.0}})
    assert sorted(found)[:4] == [
        "1_main/1_held_out_success", "1_main/2_reward/planner", "1_main/3_entropy/planner",
        "1_main/4_sampler_gap/planner",
    ]  # fmt: skip
    assert (found["step/calls"], found["seconds/update"], found["held_out/success"]) == (3.0, 2.0, 0.25)
    assert (
        without_secrets("/home/me/models/base") == "base"
        and without_secrets(3) == 3
        and without_secrets("org/model") == "org/model"
    )
    listed = [{"name": "a", "model": "/home/me/other", "loss": "/home/me/own.py:loss"}]
    assert without_secrets(listed) == [{"name": "a", "model": "other", "loss": "own.py:loss"}]
    assert without_secrets("http://me:secret@host:8000/v1") == "http://host:8000/v1"
    assert without_secrets("postgresql://host/db?sslmode=on&password=x&ApiKey=y") == (
        "postgresql://host/db?sslmode=on&password=***&ApiKey=***"
    )
