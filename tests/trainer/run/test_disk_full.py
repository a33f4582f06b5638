"""A full disk stops a run with the cause; what was saved stays whole, and the run goes on when there is room."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.algorithms.recipes import LossSpec
from cotune.cli.trace import TraceOptions, trace
from cotune.errors import RunError
from cotune.records.policies import policies_for
from cotune.storage.whole_file import sync
from cotune.trainer.learner.files import write_progress
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.conftest import Trainer
from tests.trainer.forked import Command
from tests.trainer.learner.learner_rows import FAST, SMALL, make_rows
from tests.trainer.tiny_app import TASKS, application, letters
from tests.trainer.tiny_run import ENVIRONMENT

pytestmark = pytest.mark.slow

BOTH = {"first": letters, "second": letters}


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        if "step-000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    monkeypatch.setattr("cotune.trainer.run.checkpoint.sync", full)
    app = application(**BOTH)
    with pytest.raises(RunError, match=r"after 2 steps cannot be written.*No space left.*--resume"):
        trainer(app, steps=4, policies="full")
    assert (trainer.folder / "run" / "checkpoints" / "latest").read_text() == "step-000001"
    monkeypatch.undo()
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert trainer.resume(app).finished
    assert [line["step"] for line in trainer.metrics()] == list(range(4))


def test_a_first_checkpoint_that_cannot_be_written_leaves_a_free_folder(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cotune.trainer.run.checkpoint.sync", full)
    with pytest.raises(RunError, match=r"after 0 steps cannot be written.*then start the run again") as caught:
        trainer(application(**BOTH), steps=1)
    assert "--resume" not in str(caught.value)
    assert not (trainer.folder / "run").exists()


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """Bounds how far this process may write a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", ["safetensors", "optimizer.safetensors", "progress.safetensors"])
def test_each_file_of_a_learner_tells_the_cause(base: str, tmp_path: Path, room: Any, name: str) -> None:
    learner = LocalLearner.open(base, policies_for("full", ["a"], SMALL), FAST, LossSpec())
    learner.update("a", make_rows())
    learner.save(tmp_path)
    size = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert size["0.progress.safetensors"] < size["0.safetensors"] < size["0.optimizer.safetensors"]
    (tmp_path / "again").mkdir()
    policy, order = learner._policies["a"], learner._order["a"]
    with pytest.raises(OSError, match=rf"again/0.{name}.*File too large"):
        room(size[f"0.{name}"] - 1)
        if name.startswith("progress"):
            write_progress(tmp_path / "again", policy, order, 1)
        else:
            learner.save(tmp_path / "again")


def test_tracing_into_a_place_that_cannot_be_written_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(RunError, match=f"{tmp_path}/file/runs cannot be written: Not a directory"):
        trace(
            "tests.trainer.worker_app:solve",
            str(tmp_path / "tasks.jsonl"),
            str(tmp_path / "file" / "runs"),
            TraceOptions(),
        )


def test_records_that_cannot_be_written_stop_the_run_before_it_trains(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**t, "pad": "x" * 200_000}) + "\n" for t in TASKS))
    words = ["train", "tests.trainer.worker_app:solve", "--tasks", str(tmp_path / "tasks.jsonl")]
    words += ["--model", str(tiny_base), "--out", str(tmp_path / "run"), "--steps", "3", "--tasks-per-step", "3"]
    ended = Command([*words, "-k", "4"], tmp_path, ENVIRONMENT, tmp_path / "said", file_size=1_400_000)
    assert ended.wait(250) == 1
    said = (tmp_path / "said").read_text()
    assert "records could not be stored" in said, said
    assert "--resume" in said
