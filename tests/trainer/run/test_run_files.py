"""A run goes on from its own files alone: what is missing, or belongs to another run or step, is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cotune.adapters.export import export_run
from cotune.errors import RunError
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, letters

APP = application(first=letters)


@pytest.fixture(scope="module")
def made(module_trainer: Trainer) -> Path:
    """Two runs of two steps."""
    for name in ("one", "other"):
        module_trainer(APP, steps=2, tasks_per_step=2, to=name, plan={"k": 2})
    return module_trainer.folder


@pytest.fixture
def run(made: Path, trainer: Trainer) -> Path:
    return Path(shutil.copytree(made / "one", trainer.folder / "run"))


def refused(trainer: Trainer, said: str) -> RunError:
    """The error of going on, which leaves the steps as they are."""
    file = trainer.folder / "run" / "metrics.jsonl"
    lines = file.read_bytes() if file.exists() else None
    with pytest.raises(RunError, match=said) as caught:
        trainer.resume(APP, steps=3)
    assert lines is None or file.read_bytes() == lines
    return caught.value


def test_a_run_without_latest_names_its_checkpoints(run: Path, trainer: Trainer) -> None:
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    error = refused(trainer, "The run has made steps, but .*latest is missing")
    assert error.remedy == (
        f"Continue from step-000002, which is whole (so is step-000001): echo step-000002 > {latest}, and --resume."
    )
    with pytest.raises(RunError, match=r"latest is missing.*step-000002"):
        export_run(run, trainer.folder / "to")
    latest.write_text("step-000002")
    assert trainer.resume(APP, steps=3).steps == 3
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    assert refused(trainer, "latest is missing").remedy == "No checkpoint of this run is whole: start a new run."


@pytest.mark.parametrize("name", ["records.db", "metrics.jsonl"])
def test_a_run_without_its_records_or_lines_goes_on_when_told_to(run: Path, trainer: Trainer, name: str) -> None:
    (run / name).unlink()
    error = refused(trainer, f"{name} is missing, though the run has made 2 steps")
    assert error.remedy == f"Put it back. To continue without its content: touch {run / name}, and --resume."
    (run / name).touch()
    assert trainer.resume(APP, steps=3).steps == 3


def of_another_run(run: Path, made: Path) -> None:
    step = run / "checkpoints" / "step-000002"
    shutil.rmtree(step)
    shutil.copytree(made / "other" / "checkpoints" / step.name, step)


def of_another_step(run: Path, made: Path) -> None:
    (run / "checkpoints" / "step-000002").rename(run / "checkpoints" / "step-000003")
    (run / "checkpoints" / "latest").write_text("step-000003")


def without_hashes(run: Path, made: Path) -> None:
    (run / "checkpoints" / "step-000002" / "hashes.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_another_run, "step-000002 is broken: it is of another run: {other}, this one is {one}"),
        (of_another_step, "step-000003 is broken: it is the checkpoint after 2 steps"),
        (without_hashes, "step-000002 is broken: 0.optimizer.safetensors is not in hashes.json"),
    ],
)
def test_a_checkpoint_that_is_not_this_runs_is_refused(
    made: Path, run: Path, trainer: Trainer, change: Callable[[Path, Path], None], said: str
) -> None:
    ids = {name: json.loads((made / name / "run.json").read_text())["id"] for name in ("one", "other")}
    assert ids["one"] != ids["other"]
    change(run, made)
    error = refused(trainer, said.format(**ids))
    assert error.remedy.startswith("Continue from step-000001, which is whole: ")
    with pytest.raises(RunError, match=said.format(**ids)):
        export_run(run, trainer.folder / "to")
