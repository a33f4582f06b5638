"""`cotune train --profile`: a trace of one step by torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from cotune.cli import main as cli
from cotune.trainer.learner import torch_trace
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_run import new_run
from tests.trainer.worker_app import solve

PROFILED = "for https://ui.perfetto.dev or chrome://tracing: "


def complete_events(file: Path) -> list[dict[str, Any]]:
    """Events of a trace that have a beginning and a length."""
    with gzip.open(file, "rt") as trace:
        events = json.load(trace)["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.slow
def test_the_second_step_of_a_command_is_traced_and_its_path_printed(
    in_thread: None,
    tmp_path: Path,
    tiny_base: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    run = tmp_path / "run"
    words = new_run(tiny_base, run, 3, "--profile", "-k", "4")
    assert cli.main(["train", *words]) == 0
    file = run / "profile" / "step-000002.trace.json.gz"
    said = "".join(capsys.readouterr())
    assert f"trace of step 2, {PROFILED}{file}" in said
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    threads = defaultdict(set)
    for event in complete_events(file):
        threads[event["name"]].add(event["tid"])
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= threads.keys()
    assert any("Backward" in name for name in threads)
    assert len(threads["aten::mm"] | threads["aten::addmm"]) >= 2, "the learner and the engine have a thread each"
    # A resumed run with one step left traces that one.
    assert cli.main(["train", "--resume", str(run), "--steps", "4", "--profile"]) == 0
    assert (run / "profile" / "step-000004.trace.json.gz").exists()


def test_without_the_flag_nothing_is_profiled(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_trace, "begin", lambda: pytest.fail("the profiler was started"))
    trainer(solve, steps=1)
    assert not (trainer.folder / "run" / "profile").exists()


def test_a_profiler_that_fails_ends_no_run(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("no counters here\nat all")

    monkeypatch.setattr("torch.profiler.profile", broken)
    assert trainer(solve, steps=1, profile=True).finished
    assert "step 1 has no profile: RuntimeError: no counters here" in trainer.said
    assert not (trainer.folder / "run" / "profile").exists()


def test_a_step_that_fails_leaves_no_trace_and_no_profiler_running(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **more: object) -> None:
        raise RuntimeError("the update breaks")

    ended: list[Path | None] = []
    end = torch_trace.end

    def noted(profiler: torch.profiler.profile, file: Path | None) -> None:
        ended.append(file)
        end(profiler, file)

    monkeypatch.setattr(torch_trace, "end", noted)
    with monkeypatch.context() as patch:
        patch.setattr("cotune.trainer.step.update_policies", broken)
        with pytest.raises(RuntimeError, match="the update breaks"):
            trainer(solve, steps=1, profile=True)
    assert not (trainer.folder / "run" / "profile").exists()
    assert ended == [None]
