"""A tiny model, the sampler in a thread, and runs in a folder of the test."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotune.episodes.workflows import WorkflowFunction
from cotune.trainer.reporting.summary import RunSummary
from cotune.trainer.run import checkpoint
from cotune.trainer.train import resume, train
from tests.trainer.learner.fsdp_ranks import OpenRanks
from tests.trainer.learner.learner_rows import build_learner_base
from tests.trainer.metrics_page import undocumented
from tests.trainer.tiny_app import TASKS, build_base


class Trainer:
    """Runs training on the tiny model, keeps what it said."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder = folder
        self.base = base
        self.said = ""

    def __call__(
        self,
        app: WorkflowFunction | str,
        tasks: Any = TASKS,
        *,
        to: str = "run",
        profile: bool = False,
        **settings: Any,
    ) -> RunSummary:
        settings = {"model": str(self.base), "steps": 2, "tasks_per_step": 3, **settings}
        settings["plan"] = {"k": 4, **settings.get("plan", {})}
        settings["learner"] = {"lr": 3e-3, **settings.get("learner", {})}
        more = {"out": self.folder / to, "profile": profile}
        done = self._listen(lambda console: train(app, tasks, settings, console=console, **more))
        if done.steps:
            assert [name for line in self.metrics(to) for name in undocumented(line)] == []
        return done

    def resume(
        self, app: WorkflowFunction | None, tasks: Any = TASKS, *, to: str = "run", **changes: Any
    ) -> RunSummary:
        run = self.folder / to
        return self._listen(lambda c: resume(run, workflow=app, tasks=tasks, changes=changes, console=c))

    def metrics(self, run: str = "run") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]

    def _listen(self, work: Any) -> RunSummary:
        heard = io.StringIO()
        try:
            return work(Console(file=heard, width=80))
        finally:
            self.said = heard.getvalue()


@pytest.fixture
def every_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs keep all of their checkpoints."""
    monkeypatch.setattr(checkpoint, "KEPT_CHECKPOINTS", 1000)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="module")
def _no_provider(in_thread: None) -> Iterator[None]:
    """The sampler in a thread, and no provider behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        yield


@pytest.fixture
def trainer(_no_provider: None, tiny_base: Path, tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, tiny_base)


@pytest.fixture(scope="module")
def module_trainer(_no_provider: None, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("runs"), tiny_base)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the model that the learners' tests train."""
    return build_learner_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="package")
def two_ranks(ray_runtime: str) -> Iterator[OpenRanks]:
    with OpenRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def one_rank(ray_runtime: str) -> Iterator[OpenRanks]:
    with OpenRanks(1) as ranks:
        yield ranks
