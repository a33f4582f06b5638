"""`evaluate` on a real sampler: an export and a run folder of tiny adapters on a tiny model."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cotune
from cotune.adapters.export import TrainedPolicy, write_export
from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, RunError, WorkflowError
from cotune.reading.evaluations import read_evaluations
from cotune.recording.call_records import CallerContext
from cotune.recording.context import current_episode
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import Episode
from cotune.storage.run_layout import read_run_json
from cotune.trainer.config.load import convert
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.evaluation.modes import EvaluationOptions
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.run.checkpoint import Checkpoint, save_checkpoint
from cotune.trainer.run.run_folder import RunFolder
from tests.core.storage.whole_file import copied
from tests.integrations.tiny_models import build

pytestmark = pytest.mark.usefixtures("in_thread")
LORA = LoraSpec(rank=4, alpha=8.0)
ROLES = ("first", "second")
TASKS = [{"id": f"t{i}", "text": f"say {i}"} for i in range(3)]


async def ask(role: str, text: str) -> str:
    live = current_episode.get()
    assert live is not None and live.responder is not None
    call = live.start(CallerContext(role, "test"), {"messages": [{"role": "user", "content": text}], "max_tokens": 6})
    answer = await live.responder.respond(call)
    assert answer is not None
    call.finish(answer)
    return answer.candidates[answer.chosen].text


async def talk(task: Mapping[str, Any]) -> dict[str, float]:
    first = await ask("first", task["text"])
    second = await ask("second", first)
    letters = [ord(letter) for letter in first + second]
    return {"team": sum(letters) / max(len(letters), 1), "success": len(letters) > 0}


TALK = Workflow("talk", talk)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "base"
    build("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def learner(model: Path) -> LocalLearner:
    return LocalLearner.open(str(model), policies_for("lora", ROLES, LORA), LearnerSettings(), LossSpec())


def run_of(settings: dict[str, Any], learner: LocalLearner, folder: Path) -> RunFolder:
    """A run folder with a checkpoint of these policies after one step."""
    run = RunFolder.create(folder, convert(settings), workflow="app:talk", tasks="tasks.jsonl")
    run.close()
    policies, own = policies_for("lora", ROLES, LORA), read_run_json(run.path)["id"]
    checkpoint = Checkpoint(steps=1, versions=dict.fromkeys(ROLES, 1), policies=policies, run=own)
    save_checkpoint(run.checkpoints, checkpoint, learner)
    return run


def test_an_export_in_every_mode(
    model: Path,
    learner: LocalLearner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = np.random.default_rng(0)
    trained = [
        TrainedPolicy(
            name=role,
            kind="lora",
            version=5,
            roles=(role,),
            model=str(model),
            weights={
                name: generator.normal(0, 0.3, array.shape).astype(np.float32)
                for name, array in learner.weights(role).items()
            },
            lora=LORA,
        )
        for role in ROLES
    ]
    write_export(tmp_path / "export", trained)
    report = cotune.evaluate(tmp_path / "export", TALK, TASKS, out=tmp_path / "eval")
    assert list(report.evaluations) == ["base", "trained", "swapped"]
    players = {mode: [e.roles[role].policies for role in ROLES] for mode, e in report.evaluations.items()}
    assert players["base"] == [("first@0",), ("second@0",)]
    assert players["trained"] == [("first@5",), ("second@5",)]
    assert players["swapped"] == [("second@5",), ("first@5",)]
    trained_mode, base = report.evaluations["trained"], report.evaluations["base"]
    assert trained_mode.rewards != base.rewards
    assert trained_mode.success is not None and (trained_mode.success.n, sum(trained_mode.failed.values())) == (3, 0)
    written = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    told = json.loads(json.dumps(report.to_json()))
    assert {name: written[name] for name in told} == told and written["steps"] is None
    with copied(tmp_path / "eval") as store:
        episodes = list(store.episodes())
    assert len(episodes) == 9 and {type(e) for e in episodes} == {Episode}
    assert {e.phase for e in episodes} == {f"eval-{mode}" for mode in report.evaluations}

    async def broken_off(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cotune.trainer.evaluation.evaluate.evaluate_modes", broken_off)
    with pytest.raises(KeyboardInterrupt):
        cotune.evaluate(tmp_path / "export", TALK, TASKS, out=tmp_path / "broken_off")
    assert not (tmp_path / "broken_off").exists(), "the same command works again"
    monkeypatch.undo()

    async def interrupted(task: Mapping[str, Any]) -> dict[str, float]:
        if task["text"] == TASKS[1]["text"]:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        return await talk(task)

    app, more = Workflow("talk", interrupted), {"concurrency": 1, "modes": ("base",)}
    with pytest.raises(KeyboardInterrupt):
        cotune.evaluate(tmp_path / "export", app, TASKS, out=tmp_path / "broken_off", **more)
    with copied(tmp_path / "broken_off") as store:
        assert {e.task.id: e.status for e in store.episodes()} == {"t0": "ok", "t1": "cancelled"}
    assert "The episodes that have ended are kept (1): cotune show" in caplog.text


def test_a_run_whose_adapters_have_not_moved_equals_its_base(
    model: Path, learner: LocalLearner, tmp_path: Path
) -> None:
    run = run_of({"model": str(model), "sampling": {"max_tokens": 6}}, learner, tmp_path / "run")
    report = evaluate(run.path, TALK, TASKS[:2], EvaluationOptions(), modes=("base", "trained"), temperature=0.0)
    greedy, base = report.evaluations["trained"], report.evaluations["base"]
    assert greedy.roles["first"].policies == ("first@1",)
    assert greedy.rewards == base.rewards and sorted(greedy.rewards) == ["t0", "t1"]
    found, again = read_evaluations(run.path), evaluate(run.path, TALK, TASKS[:1], modes=("base",))
    assert [(one.name, one.steps, one.records) for one in found] == [("eval", 1, str(run.path / "eval"))]
    assert {task: ending.reward for task, ending in found[0].evaluations["trained"].endings.items()} == greedy.rewards
    assert report.stored == str(run.path / "eval") and again.stored == str(run.path / "eval-2")
    (comparison,) = report.comparisons
    assert comparison.reward is not None and (comparison.reward.mean, comparison.reward.n) == (0.0, 2)


def test_an_episode_of_a_run_has_as_long_as_in_training(model: Path, learner: LocalLearner, tmp_path: Path) -> None:
    run = run_of({"model": str(model), "episode_timeout": 0.25}, learner, tmp_path / "run")

    async def waits(task: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(WorkflowError, match=r"did not finish within 0.25 seconds"):
        evaluate(run.path, Workflow("waits", waits), TASKS[:1], modes=("base",), threads=1)


def test_bad_input_is_named_before_work_starts(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run.json"):
        evaluate(tmp_path, TALK, TASKS)
    with pytest.raises(ConfigError, match="tasks"):
        evaluate(tmp_path, TALK, tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="modes = 'best'"):
        evaluate(tmp_path, TALK, TASKS, modes=("best",))
    with pytest.raises(ConfigError, match="samples = 0 must be a number above 0"):
        EvaluationOptions(samples=0)
