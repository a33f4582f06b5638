"""What a rollback abandons is never trained on again, is shown as abandoned, and no version is used twice."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.episodes.workflows import WorkflowFunction
from cotune.records.structs import Episode
from cotune.storage.metrics_file import read_metrics
from cotune.storage.run_layout import RunLayout
from cotune.storage.sql import writer
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer import loop
from cotune.trainer.rollout import source
from cotune.trainer.run import restore
from cotune.trainer.run.checkpoint import save_checkpoint
from tests.trainer.conftest import Trainer
from tests.trainer.run.test_kill import assert_same_weights
from tests.trainer.tiny_app import application, ask

SETTINGS = {
    "plan": {"kind": "independent", "k": 2},
    "policies": "full",
    "concurrency": 1,
    "keep_checkpoints": 9,
    "steps": 8,
    "sampling": {"prefix_cache": "0B"},
    "guard": {"action": "roll_back", "window": 2},
}
EPISODES = 6
"""Of a step."""


class Killed(BaseException):
    """The process is gone."""


async def little(task: Any) -> float:
    """A call, and a small number that its answer decides."""
    return sum(map(ord, await ask("first", f"say {task['letter']}"))) % 97 / 10_000


def falling(seventh: Callable[[], bool] = lambda: True) -> WorkflowFunction:
    """Outcomes that rise for four steps and then fall. Episodes of the seventh step wait until `seventh` is true."""
    ran = [-3]  # the preflight's episodes

    async def solve(task: Any) -> float:
        step, ran[0] = ran[0] // EPISODES, ran[0] + 1
        while step == 6 and not seventh():
            await asyncio.sleep(0.01)
        return await little(task) + ([0.0, 0.5, 1.0, 1.0][step] if 0 <= step < 4 else 0.0)

    made = application(solve)
    made.ran = ran  # type: ignore[attr-defined]
    return made


def rising() -> WorkflowFunction:
    """Outcomes as good as the best before."""
    ran = [0]

    async def solve(task: Any) -> float:
        ran[0] += 1
        return 1.0 + await little(task)

    made = application(solve)
    made.ran = ran  # type: ignore[attr-defined]
    return made


@pytest.fixture(scope="module")
def collapsed(module_trainer: Trainer) -> Path:
    """A run that made six steps, collapsed, and went back to the fourth."""
    summary = module_trainer(falling(), to="collapsed", **SETTINGS)
    assert summary.steps == 6 and summary.ended.endswith("rolled back to step-000004")
    return module_trainer.folder / "collapsed"


@pytest.fixture
def run(collapsed: Path, trainer: Trainer) -> Path:
    return Path(shutil.copytree(collapsed, trainer.folder / "run"))


def episodes(run: Path, status: str) -> list[Episode]:
    with SqliteStore.open(run, read_only=True) as store:
        return [episode for episode in store.episodes(phase="train") if episode.status == status]


def sampled(run: Path, some: list[Episode]) -> tuple[set[int], list[tuple[int, ...]]]:
    """Versions that answered in episodes, and the token ids of their answers."""
    with SqliteStore.open(run, read_only=True) as store:
        calls = [call for episode in some for call in store.calls(episode.id)]
    return {call.policy.version for call in calls if call.policy}, [call.candidates[0].token_ids for call in calls]


def test_abandoned_steps_are_sampled_anew_under_new_versions(run: Path, trainer: Trainer) -> None:
    old = episodes(run, "abandoned")
    before, said_before = sampled(run, old)
    app = rising()
    summary = trainer.resume(app, guard={"action": "off"}, steps=7)
    assert summary.steps == 7 and app.ran == [3 * EPISODES]  # type: ignore[attr-defined]
    assert episodes(run, "abandoned") == old
    assert Counter(e.training_step for e in episodes(run, "ok")) == dict.fromkeys(range(7), EPISODES)
    after, said_after = sampled(run, [e for e in episodes(run, "ok") if e.training_step in (4, 5, 6)])
    assert before == {4, 5} and after == {7, 8, 9}  # 6 was published too
    assert said_before != said_after[: len(said_before)]
    assert [line["step"] for line in trainer.metrics()] == list(range(7))
    assert [line["policies"]["first"]["version"] for line in trainer.metrics()] == [1, 2, 3, 4, 8, 9, 10]
    checkpoints = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert checkpoints == [f"step-{steps:06d}" for steps in range(8)]


def test_what_is_abandoned_is_shown_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Counter(e.training_step for e in episodes(run, "abandoned")) == {4: EPISODES, 5: EPISODES}
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2, 3]
    lines = [json.loads(line) for line in RunLayout(run).abandoned.read_text().splitlines()]
    assert [(line["step"], line["rollback"]) for line in lines] == [(4, 1), (5, 1)]
    assert main(["show", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "steps 5 to 6 abandoned: rolled back to step 4, as the guard: " in said
    assert "episodes ok error cancelled abandoned tasks" in said and "train 36 24 0 0 12 3" in said
    assert main(["show", str(run), "--status", "abandoned", "--limit", "1"]) == 0
    assert "the latest 1 of 12 episodes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("where", ["_abandon", "write_atomically"])
def test_a_rollback_that_is_killed_is_finished_by_resume(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def killed(*given: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(restore, where, killed)
        trainer(falling(), **SETTINGS)
    run = trainer.folder / "run"
    assert (run / "checkpoints" / "latest").read_text() == "step-000006"
    app = rising()
    trainer.resume(app, guard={"action": "off"}, steps=5)
    assert app.ran == [EPISODES]  # type: ignore[attr-defined]
    assert Counter(e.training_step for e in episodes(run, "abandoned")) == {4: EPISODES, 5: EPISODES}
    assert len(RunLayout(run).abandoned.read_text().splitlines()) == 2
    assert [line["step"] for line in trainer.metrics()] == list(range(5))
    assert len(json.loads((run / "run.json").read_text())["rollbacks"]) == 1


def test_a_run_killed_after_a_rollback_ends_like_one_that_was_not(
    run: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*given: Any, **more: Any) -> None:
        raise Killed

    shutil.copytree(run, trainer.folder / "killed")
    changes = {"guard": {"action": "off"}, "steps": 7}
    trainer.resume(rising(), **changes)
    for moment in ("collect_samples", "note_best"):  # before the first update, then after it
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(source, moment, killed)
            trainer.resume(rising(), to="killed", **changes)
    last = rising()
    trainer.resume(last, to="killed", **changes)
    assert last.ran == [2 * EPISODES]  # type: ignore[attr-defined]
    assert_same_weights(run, trainer.folder / "killed")


def test_what_was_rolled_out_ahead_is_abandoned_too(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    last = threading.Event()
    app = falling(last.is_set)

    def while_rolled_out(folder: Path, state: Any, learner: Any, **more: Any) -> None:
        """The last checkpoint takes until an episode of the next step has ended, and another has begun."""
        if state.steps == 6:
            last.set()
            while app.ran[0] < 6 * EPISODES + 2:  # type: ignore[attr-defined]
                time.sleep(0.01)
        save_checkpoint(folder, state, learner, **more)

    monkeypatch.setattr(loop, "save_checkpoint", while_rolled_out)
    monkeypatch.setattr(writer, "LINGER", 60.0)  # on record only where something waits for it
    trainer(app, **SETTINGS, mode="async")
    monkeypatch.undo()
    run = trainer.folder / "run"
    steps = {json.loads(line)["step"] for line in RunLayout(run).abandoned.read_text().splitlines()}
    first = min(steps)
    assert max(e.training_step or 0 for e in episodes(run, "ok")) == first - 1
    assert {e.training_step for e in episodes(run, "abandoned")} > steps
    trainer.resume(rising(), guard={"action": "off"}, steps=first + 3)
    assert [line["left_out"].get("stale_version", 0) for line in trainer.metrics()[first:]] == [0, 0, 0]
    assert max(line["staleness"].get("1", 0) for line in trainer.metrics()[first:]) == EPISODES
