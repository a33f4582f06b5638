"""The guard watches what is trained on, in the right direction, on tasks that compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotune.records.structs import Task
from cotune.trainer.config.curriculum import CurriculumConfig
from cotune.trainer.config.guard import GuardConfig
from cotune.trainer.guard import best_window, collapse, of_one_level
from cotune.trainer.schedules.curriculum import schedule_of
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask

GUARD = GuardConfig(action="stop", window=2)


def steps(**rewards: list[float]) -> list[Mapping[str, Any]]:
    """Metrics of steps with these trained rewards by role."""
    count = len(next(iter(rewards.values())))
    roles = [{role: {"task_reward": of[i]} for role, of in rewards.items()} for i in range(count)]
    return [{"step": i, "outcome": {}, "roles": own} for i, own in enumerate(roles)]


def test_a_run_that_gets_better_goes_on_although_what_it_returns_falls(trainer: Trainer) -> None:
    """The answers get shorter, as the weight asks: the metric and the component fall, the trained reward rises."""
    tokens = [8.0, 8.0, 8.0, 2.0, 1.0, 1.0]
    ran = [-3]  # the preflight's episodes

    async def shorter(task: Any) -> dict[str, float]:
        step, ran[0] = max(ran[0] // 6, 0), ran[0] + 1
        await ask("first", f"say {task['letter']}")
        return {"tokens": tokens[step], "length": tokens[step]}

    settings = {"plan": {"kind": "independent", "k": 2}, "concurrency": 1, "steps": 6}
    overrides = {"weights": {"tokens": -0.125}}
    guard = {"action": "roll_back", "window": 2}
    summary = trainer(application(shorter), guard=guard, overrides=overrides, **settings)
    assert (summary.steps, summary.ended) == (6, "")
    lines = trainer.metrics()
    assert [line["roles"]["first"]["task_reward"] for line in lines] == [-1.0, -1.0, -1.0, -0.25, -0.125, -0.125]
    assert best_window(lines, 2) == 6, "the newest checkpoint is the safe one"


def test_each_role_is_watched_and_seats_together() -> None:
    lost, won = [1.0, 1.0, 1.0, 0.0, 0.0], [-1.0, -1.0, -1.0, 0.0, 0.0]
    said = "the reward of role white fell from 1.000 to 0.000 (means over 2 steps)"
    assert collapse(steps(white=lost, black=won), GUARD) == said
    assert collapse(steps(white=lost, black=won), GUARD, "together") is None, "black wins what white loses"
    both = collapse(steps(white=lost, black=lost), GUARD, "together")
    assert both == "the mean reward of all roles fell from 1.000 to 0.000 (means over 2 steps)"
    assert collapse(steps(white=lost), GUARD, "none") is None


def test_a_role_that_is_not_trained_in_each_step_is_compared_with_its_own_steps() -> None:
    lines = steps(white=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], black=[0.1] * 6)
    turns = [
        {**line, "roles": {role: line["roles"][role]}} for line, role in zip(lines, ["white", "black"] * 3, strict=True)
    ]
    assert collapse(turns, GUARD) is None and best_window(turns, 2) == 2


def test_a_harder_level_is_no_collapse() -> None:
    tasks = [Task(id=f"{level}-{i}", input={"level": level}) for level in (1, 2) for i in range(2)]
    schedule = schedule_of(tasks, CurriculumConfig(by="level", level_steps=4), 0, [(0, 2)])
    lines = steps(a=[0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])
    assert collapse(lines, GUARD) is not None
    for seen in range(1, len(lines) + 1):
        assert collapse(of_one_level(lines[:seen], schedule.level), GUARD) is None
    assert [line["step"] for line in of_one_level(lines, schedule.level)] == [8, 9], "all tasks"
    within = steps(a=[0.1] * 4 + [0.8, 0.8, 0.1, 0.1])
    assert collapse(of_one_level(within, schedule.level), GUARD) is not None


def test_fewer_episodes_of_easy_tasks_change_nothing(trainer: Trainer) -> None:
    """One task of three is solved at once, and then tried less often: the mean over candidates falls."""

    async def first_alone(task: Any) -> float:
        await ask("first", f"say {task['letter']}")
        return float(task["id"] == "a")

    curriculum = {"k_easy": 2, "easy": 1.0}
    trainer(application(first_alone), plan={"kind": "independent", "k": 4}, curriculum=curriculum)
    figures = [line["roles"]["first"] for line in trainer.metrics()]
    assert [found["reward"] for found in figures] == [1 / 3, 0.2]
    assert [round(found["task_reward"], 9) for found in figures] == [round(1 / 3, 9)] * 2
