"""The tasks that a run failed, the worst first, for every kind of run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotune.reading.failed_tasks import FailedTasks, failed_tasks
from cotune.reading.run import OpenedRun
from cotune.records.structs import CallRecord, Candidate, Episode, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore

HELD_OUT = "prompts-held-out"


def record(folder: Path, number: int, success: float | None, **about: Any) -> str:
    """An episode of the task `tN`, which asks for N + 1, and answers N unless it is right. Its id tells the order."""
    reward = about.pop("reward", success)
    id = f"E{number:03}-{about.get('phase', 'trace')}-{about.get('training_step')}-{about.get('rollout', 0)}"
    task = Task(id=f"t{number}", input={"question": f"{number} + 1?", "answer": number + 1})
    text = f"it is {number + 1 if success else number}"
    said = Candidate(index=0, text=text, message={"role": "assistant", "content": text})
    metrics = {} if success is None else {"success": success}
    folder.mkdir(exist_ok=True)
    with SqliteStore.open(folder) as store:
        store.write([CallRecord(id=f"C{id}", episode=id, role="r", step=0, turn=0, candidates=(said,), chosen=0)])
        store.write([Episode(id=id, task=task, workflow="w", calls=1, metrics=metrics, **about)])
        if reward is not None:
            store.write([RewardRecord(id, "team", reward)])
    return id


def found(folder: Path, most: int = 10) -> FailedTasks:
    with OpenedRun(folder, "r1") as run:
        tasks = failed_tasks(run, run.headline, most)
    assert tasks is not None
    return tasks


def ids(folder: Path) -> list[str]:
    return [one.task for one in found(folder).tasks]


def test_a_failed_task_has_its_question_answer_expected_answer_and_error(tmp_path: Path) -> None:
    folder = tmp_path / "traced"
    record(folder, 1, 1.0)
    wrong = record(folder, 2, 0.0)
    failed = record(folder, 3, None, status="error", error="ValueError: no plan\nline 2")
    shown = found(folder)
    assert (shown.total, shown.known, shown.source, shown.place) == (2, 3, "the recorded episodes", "r1")
    first, second = shown.tasks
    assert (first.task, first.episode, first.error) == ("t3", failed, "ValueError: no plan"), "errors are the worst"
    assert (second.task, second.episode, second.error) == ("t2", wrong, "")
    assert second.exchange.question == "2 + 1?" and second.exchange.answer == "it is 2"
    assert second.exchange.expected == "3"
    assert len(found(folder, most=1).tasks) == 1


def test_a_task_that_is_solved_less_often_comes_first(tmp_path: Path) -> None:
    for rollout in range(2):
        record(tmp_path / "traced", 1, 1.0, rollout=rollout)
        record(tmp_path / "traced", 2, float(rollout), rollout=rollout)
        record(tmp_path / "traced", 3, 0.0, rollout=rollout)
    shown = found(tmp_path / "traced")
    assert [(one.task, one.success, one.runs) for one in shown.tasks] == [("t3", 0.0, 2), ("t2", 0.5, 2)]
    assert shown.tasks[1].exchange.answer == "it is 2", "the run that failed is shown, not the one that did not"


def test_without_success_tasks_below_the_highest_reward_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "traced"
    for number, reward in ((1, 0.5), (2, 1.0), (3, -1.0), (4, 1.0)):
        record(folder, number, None, reward=reward)
    assert found(folder).measure == "reward" and ids(folder) == ["t3", "t1"]


@pytest.mark.parametrize(
    ("on_failure", "means", "order"),
    [
        ("lowest", {"t1": 0.25, "t2": 0.4}, ["t1", "t2"]),
        ("reward:-1", {"t1": -0.25, "t2": 0.4}, ["t1", "t2"]),
        ("exclude", {"t1": 0.5, "t2": 0.4}, ["t2", "t1"]),
    ],
)
def test_failed_episodes_count_in_the_mean_reward_of_a_task(
    tmp_path: Path, on_failure: str, means: dict[str, float], order: list[str]
) -> None:
    folder = tmp_path / "traced"
    record(folder, 1, None, reward=0.5)
    record(folder, 1, None, rollout=1, status="error", error="ValueError: no")
    record(folder, 2, None, reward=0.4)
    record(folder, 3, None, reward=1.0)
    (folder / "run.json").write_text(json.dumps({"config": {"on_failure": on_failure}}))
    assert {task.task: task.reward for task in found(folder).tasks} == pytest.approx(means)
    assert ids(folder) == order


def test_equal_rewards_are_no_failures(tmp_path: Path) -> None:
    for number in range(3):
        record(tmp_path / "traced", number, None, reward=0.5)
    assert found(tmp_path / "traced").total == 0


def test_episodes_that_say_nothing_of_a_task_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "traced"
    record(folder, 1, 0.0, phase="check")
    record(folder, 2, 0.0, status="cancelled")
    record(folder, 3, None)
    with OpenedRun(folder) as run:
        assert failed_tasks(run, run.headline, 10) is None


def test_of_a_training_run_the_last_step_counts(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    for step in range(2):
        for number in range(3):
            record(folder, number, float(number < 1 + step), phase="train", training_step=step)
    (folder / "run.json").write_text(json.dumps({"config": {"steps": 2}}))
    assert ids(folder) == ["t2"] and found(folder).source == "training tasks of step 2"


def mode(successes: dict[int, float | None], **about: Any) -> dict[str, Any]:
    endings = {
        f"t{number}": {"status": "error", "error": "ValueError: no"} if success is None
        else {"status": "ok", "success": success > 0, "outcome": success}
        for number, success in successes.items()
    }  # fmt: skip
    return {"episodes": len(endings), "endings": endings, **about}


def test_of_an_evaluation_the_trained_mode_counts(tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    after: dict[int, float | None] = {1: 1.0, 2: 0.0, 3: None}
    for number, success in after.items():
        record(folder, number, 1.0, phase="eval-base")
        about = {} if success is not None else {"status": "error", "error": "ValueError: no"}
        record(folder, number, success, phase="eval-trained", **about)
    evaluations = {"base": mode({1: 1.0, 2: 1.0, 3: 1.0}), "trained": mode(after)}
    (folder / "evaluation.json").write_text(json.dumps({"evaluations": evaluations, "tasks": "/data/test.jsonl"}))
    shown = found(folder)
    assert [(one.task, one.error) for one in shown.tasks] == [("t3", "ValueError: no"), ("t2", "")]
    assert shown.tasks[1].exchange.answer == "it is 2" and shown.source == "trained on test.jsonl"


def test_of_repeated_runs_of_an_evaluation_one_that_failed_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    record(folder, 1, 1.0, phase="eval-trained", rollout=0)
    failed = record(folder, 1, 0.0, phase="eval-trained", rollout=1)
    repeats = {"t1": [{"status": "ok", "success": False, "outcome": 0.0}]}
    evaluations = {"trained": mode({1: 1.0}, repeats=repeats)}
    (folder / "evaluation.json").write_text(json.dumps({"evaluations": evaluations}))
    (one,) = found(folder).tasks
    assert (one.success, one.runs, one.episode, one.exchange.answer) == (0.5, 2, failed, "it is 1")


def test_an_evaluation_without_records_names_its_failed_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    (folder / "eval").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": {"steps": 2}}))
    evaluations = {"base": mode({1: 1.0}), "trained": mode({1: 0.0})}
    (folder / "eval" / "evaluation.json").write_text(json.dumps({"evaluations": evaluations}))
    (one,) = found(folder).tasks
    assert (one.task, one.episode, one.exchange.question, found(folder).place) == ("t1", "", "", "")


@pytest.mark.parametrize("best", ["p" * 64, ""])
def test_of_a_search_the_best_prompts_on_held_out_tasks_count(tmp_path: Path, best: str) -> None:
    folder = tmp_path / "search"
    for rollout, prompts in enumerate(("", "p" * 64)):
        record(folder, 1, float(prompts == best), phase=HELD_OUT, prompts=prompts, rollout=rollout)
        record(folder, 2, float(prompts != best), phase=HELD_OUT, prompts=prompts, rollout=rollout)
    record(folder, 3, 0.0, phase="prompts", prompts=best)
    (folder / "prompts.json").write_text(json.dumps({"format": 1, "id": best}))
    assert ids(folder) == ["t2"] and found(folder).source == "the best prompts on held-out tasks"


def test_a_search_without_held_out_episodes_shows_its_latest_ones(tmp_path: Path) -> None:
    record(tmp_path / "search", 1, 0.0, phase="prompts")
    assert ids(tmp_path / "search") == ["t1"]
    assert found(tmp_path / "search").source == "the latest episodes of the search"


def test_a_large_store_is_read_at_its_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotune.reading.failed_tasks.MOST_EPISODES", 3)
    for number in range(6):
        record(tmp_path / "traced", number, 0.0)
    shown = found(tmp_path / "traced")
    assert (shown.known, shown.source) == (3, "the latest 3 episodes")
    assert {one.task for one in shown.tasks} == {"t3", "t4", "t5"}
