"""A full disk stops a run with the cause; what was saved stays whole, and the run goes on when there is room."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cotune.errors import RunError
from cotune.trainer.checkpoint import _sync_file
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS, application, letters

ROOT = Path(__file__).parents[2]
BOTH = {"first": letters, "second": letters}


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        if "step-000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        _sync_file(path)

    monkeypatch.setattr("cotune.trainer.checkpoint._sync_file", full)
    app = application(**BOTH)
    with pytest.raises(RunError, match=r"after 2 steps cannot be written.*No space left.*--resume"):
        trainer(app, steps=4, policies="full")
    assert (trainer.folder / "run" / "checkpoints" / "latest").read_text() == "step-000001"
    monkeypatch.undo()
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert trainer.resume(app).finished
    assert [line["step"] for line in trainer.metrics()] == list(range(4))


def test_records_that_cannot_be_written_stop_the_run_before_it_trains(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**t, "pad": "x" * 200_000}) + "\n" for t in TASKS))
    command = [sys.executable, "-m", "cotune.cli", "train", "tests.trainer.worker_app:solve"]
    command += ["--tasks", str(tmp_path / "tasks.jsonl"), "--model", str(tiny_base), "--out", str(tmp_path / "run")]
    command += ["--steps", "3", "--tasks-per-step", "3", "-k", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, **limited(1_400_000))
    assert done.returncode == 1
    assert "records could not be stored" in done.stderr, done.stderr
    assert "--resume" in done.stderr


def limited(size: int) -> dict[str, Any]:
    """No file of the process may grow beyond `size` bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    return {"env": environment, "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}
