"""What is typed at `--resume`: safe changes are made and recorded, others refused by name; tasks and base are held."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from cotune.adapters.export import latest_policies
from cotune.errors import ConfigError, RunError
from cotune.recording.context import current_episode
from cotune.records.structs import RewardRecord
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.train import resume
from tests.trainer.conftest import Trainer
from tests.trainer.forked import Command
from tests.trainer.tiny_app import TASKS, application, ask, converse, letters
from tests.trainer.tiny_run import ENVIRONMENT

pytestmark = pytest.mark.slow

BOTH = {"first": letters, "second": letters}


@pytest.fixture(scope="module")
def made(module_trainer: Trainer) -> Path:
    """A run of two steps that has finished; copied by whoever goes on with it."""
    module_trainer(application(**BOTH), steps=2, tasks_per_step=2, to="made", plan={"k": 2})
    return module_trainer.folder / "made"


def copied(made: Path, trainer: Trainer) -> Path:
    return Path(shutil.copytree(made, trainer.folder / "run"))


def test_a_finished_run_is_given_more_steps_and_what_is_safe_is_recorded(made: Path, trainer: Trainer) -> None:
    run = copied(made, trainer)
    changes = {"steps": 4, "tasks_per_step": 3, "learner.memory": "9GiB", "checkpoint_every": 2}
    summary = trainer.resume(application(**BOTH), **changes)
    assert summary.finished and summary.steps == 4
    assert [line["episodes"] for line in trainer.metrics()] == [2, 2, 3, 3]
    assert "changed: steps = 4, was 2\n" in trainer.said
    assert "changed: learner.memory = '9GiB', was ''\n" in trainer.said
    described = json.loads((run / "run.json").read_text())
    assert described["config"]["steps"] == 4 and described["config"]["learner"]["memory"] == "9GiB"
    assert described["changes"] == [
        {
            "step": 2,
            "changed": {
                "steps": [2, 4],
                "tasks_per_step": [2, 3],
                "checkpoint_every": [1, 2],
                "learner.memory": ["", "9GiB"],
            },
        }
    ]
    again = trainer.resume(application(**BOTH), steps=5, learner={"memory": "9GiB"})
    assert again.steps == 5 and [line["episodes"] for line in trainer.metrics()] == [2, 2, 3, 3, 3]
    assert json.loads((run / "run.json").read_text())["changes"][1] == {"step": 4, "changed": {"steps": [4, 5]}}


def test_a_curriculum_of_a_run_that_gets_longer_keeps_its_levels(trainer: Trainer) -> None:
    tasks = [{"id": name, "letter": name, "hard": int(name > "b")} for name in "abcd"]
    settings = {"steps": 3, "tasks_per_step": 1, "plan": {"k": 2}, "curriculum": {"pool": "by:hard"}}
    trainer(application(first=letters), tasks, **settings)
    trainer.resume(application(first=letters), tasks, steps=6)
    drawn: list[str] = []
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        for step in range(6):
            drawn += [episode.task.id for episode in store.episodes(EpisodeFilters(phase="train", training_step=step))]
    assert drawn[0] in "ab" and drawn[1] in "cd"
    assert sorted(drawn[2:]) == list("abcd"), "one pass over all tasks, begun before the run got longer"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learner.lr": 1e-4}, "learner.lr = 0.0001 was 0.003 when the run was started."),
        ({"learner": {"lr": 1e-4}}, "learner.lr = 0.0001 was 0.003 when the run was started."),
        ({"recipe": "grpo"}, "recipe = 'grpo' was None when the run was started."),
        ({"loss.kl": 0.1}, "loss.kl = 0.1 was None when the run was started."),
        ({"plan.k": 4}, "plan.k = 4 was 2 when the run was started."),
        ({"seed": 1}, "seed = 1 was 0 when the run was started."),
        ({"steps": 1}, "steps = 1 is less than the 2 steps that the run has done."),
        ({"stepz": 9}, "stepz = 9 is not a field of the configuration"),
    ],
)
def test_any_other_change_is_refused_by_name(made: Path, trainer: Trainer, changes: dict[str, Any], said: str) -> None:
    run = copied(made, trainer)
    before = (run / "run.json").read_text()
    with pytest.raises(ConfigError) as caught:
        trainer.resume(application(**BOTH), **changes)
    assert str(caught.value).startswith(said)
    assert (run / "run.json").read_text() == before


def test_other_tasks_and_another_base_are_refused(made: Path, trainer: Trainer, tiny_base: Path) -> None:
    run = copied(made, trainer)
    with pytest.raises(RunError, match=r"not the ones that the run was started with: 3 then, 2 now\."):
        trainer.resume(application(**BOTH), TASKS[:2], steps=3)
    with pytest.raises(RunError, match="ids, inputs or their order changed"):
        trainer.resume(application(**BOTH), [*TASKS[:2], {"id": "c", "letter": "d"}], steps=3)
    moved = Path(shutil.copytree(tiny_base, trainer.folder / "base"))
    assert trainer.resume(application(**BOTH), model=str(moved), steps=3).steps == 3
    tensors = load_file(moved / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, moved / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"base model is not the one .* its weights changed"):
        trainer.resume(application(**BOTH))
    assert "all 3 steps of the run are done: pass --steps with a larger number to continue" in trainer.said
    assert json.loads((run / "run.json").read_text())["config"]["model"] == str(moved)


APP = """
from tests.trainer.tiny_app import application, letters
solve = application(first=letters, second=letters)
"""


def test_the_command_takes_changes_and_a_moved_run_finds_its_files(trainer: Trainer, tiny_base: Path) -> None:
    """All of a project moves: application, tasks, base, teacher and run; it goes on from another folder."""
    project = trainer.folder / "project"
    for name in ("base", "teacher"):
        shutil.copytree(tiny_base, project / name)
    (project / "moving_app.py").write_text(APP)
    (project / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    app, tasks = f"{project}/moving_app.py:solve", project / "tasks.jsonl"
    taught = {"recipe": "distill", "distill": {"teacher": str(project / "teacher")}, "plan": {"k": 2}}
    trainer(app, tasks, to="project/run", model=str(project / "base"), steps=1, **taught)
    moved = project.rename(trainer.folder / "elsewhere")
    assert [policy.model for policy in latest_policies(moved / "run")] == [str(moved / "base")] * 2
    words = ["train", "--resume", "elsewhere/run", "--steps", "2", "--set", "concurrency=2"]
    more, log = Command(words, moved.parent, ENVIRONMENT, trainer.folder / "said"), trainer.folder / "said"
    assert more.wait(250) == 0, log.read_text()
    assert "finished after 2 steps" in log.read_text()
    assert "changed: concurrency = 2, was 64" in log.read_text()
    (moved / "base").rename(moved / "old")
    for go in (lambda: resume(moved / "run"), lambda: evaluate(moved / "run", application(**BOTH), TASKS)):
        with pytest.raises(ConfigError, match=r"no such folder\. .*If it was moved, give its place with --model"):
            go()


def test_an_episode_whose_records_were_lost_is_run_again_and_never_counts_as_whole(trainer: Trainer) -> None:
    """A write that failed took calls of one episode and a prompt of another; both ended well before."""
    ran = []

    async def run(task: dict[str, str]) -> dict[str, float]:
        ran.append(task["id"])
        if len(ran) == 3 + 3 + 1:
            raise KeyboardInterrupt
        return await converse(task)

    settings = {"steps": 2, "concurrency": 1, "plan": {"k": 2}, "checkpoint_every": 9}
    with pytest.raises(BaseException):  # noqa: B017
        trainer(application(run, **BOTH), **settings)
    store = SqliteStore.open(trainer.folder / "run")
    episodes = list(store.episodes(EpisodeFilters(phase="train")))
    assert [(e.task.id, e.status, e.calls) for e in episodes if e.status == "ok"] == [(t["id"], "ok", 2) for t in TASKS]
    whole, without_call, without_prompt = (e.id for e in episodes[:3])
    prompt = store.calls(without_prompt)[1].prompt
    store._writer._db.execute("DELETE FROM calls WHERE episode = ? AND step = 1", (without_call,))
    store._writer._db.execute("DELETE FROM segments WHERE id = ?", (prompt,))
    store.close()
    ran.clear()
    summary = trainer.resume(application(converse, **BOTH))
    assert summary.finished
    assert "2 episodes of step 1 lack records or rewards: they are run again\n" in trainer.said
    line = trainer.metrics()[0]
    assert (line["episodes"], line["calls"], line["candidates"]) == (3, 6, 12)
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        status = {e.id: e.status for e in store.episodes(EpisodeFilters(phase="train", training_step=0))}
        assert [status[i] for i in (whole, without_call, without_prompt)] == ["ok", "cancelled", "cancelled"]
        assert sorted(status.values()) == ["cancelled"] * (len(status) - 3) + ["ok"] * 3


@pytest.mark.parametrize("plan", [{"kind": "tree", "k": 4}, {"kind": "independent", "k": 4}])
def test_a_late_reward_counts_until_its_group_is_trained_and_is_refused_after(trainer: Trainer, plan: Any) -> None:
    """In step 2 the workflow writes rewards for the candidates and episodes of step 1."""
    past: list[tuple[str, str]] = []

    async def run(task: dict[str, str]) -> float:
        live = current_episode.get()
        if live.phase == "train" and live.training_step == 1:
            live.sink.write([RewardRecord(target, name, -9.0) for target, name in past])
        said = await ask("first", f"say {task['letter']}")
        if live.phase == "train":
            past.append((live.id, "team"))
        return said.count("a") / 4 + len(past) % 5  # different ones for each task

    scorers = {"first": letters} if plan["kind"] == "tree" else {}
    trainer(application(run, **scorers), steps=2, plan=plan, concurrency=1)
    lines = trainer.metrics()
    assert lines[0]["rows"] > 0
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        first = [e.id for e in store.episodes(EpisodeFilters(phase="train", training_step=0))]
        values = [store.rewards([i])[i]["team"] for i in first]
    kept = sum(value != -9.0 for value in values)
    assert kept == len(first)
    assert lines[1]["counters"]["late_rewards_refused"] >= len(first)
    assert f"late_rewards_refused {lines[1]['counters']['late_rewards_refused']}" in trainer.said
