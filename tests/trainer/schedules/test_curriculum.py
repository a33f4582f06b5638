"""Curricula: levels of tasks one after the other, and fewer episodes of tasks that have become easy."""

from __future__ import annotations

import pytest

from cotune.config.rollouts import CurriculumConfig
from cotune.errors import ConfigError
from cotune.records.structs import Task
from cotune.trainer.schedules.curriculum import schedule_of
from tests.trainer.tiny_app import TASKS, application, ask

LEVELS = CurriculumConfig(pool="by:hard")


def tasks(*levels: float) -> list[Task]:
    return [Task(id=str(i), input={"hard": level}) for i, level in enumerate(levels)]


def ids(config: CurriculumConfig, given: list[Task], *counts: tuple[int, int], steps: int) -> list[list[str]]:
    schedule = schedule_of(given, config, steps, 0, counts)
    return [[task.id for task in schedule.of(step)] for step in range(steps)]


def test_steps_take_one_level_after_the_other_and_then_all():
    found = ids(LEVELS, tasks(3, 1, 2, 1), (0, 2), steps=8)
    assert [sorted(step) for step in found[:6]] == [["1", "3"], ["1", "3"], ["2"], ["2"], ["0"], ["0"]]
    assert sorted(found[6] + found[7]) == ["0", "1", "2", "3"]


def test_a_curriculum_is_the_same_whichever_step_is_asked_first():
    given = tasks(*[0] * 5, *[1] * 7)
    one, other = (schedule_of(given, LEVELS, 6, 0, [(0, 3)]) for _ in range(2))
    every = [one.of(step) for step in range(6)]
    assert [other.of(step) for step in (3, 0, 2)] == [every[3], every[0], every[2]]


def test_each_level_and_all_tasks_have_an_equal_part_of_the_run():
    given = tasks(0, 1)
    assert [len(set(step)) for step in ids(LEVELS, given, (0, 2), steps=9)] == [1] * 6 + [2] * 3
    assert ids(LEVELS, given, (0, 2), steps=2) == [["0"], ["1"]], "a run that is too short has one step for each"


def test_the_number_of_tasks_changes_at_its_step_in_every_level():
    found = ids(LEVELS, tasks(*[0] * 6, *[1] * 6), (0, 2), (1, 3), (3, 4), steps=6)
    assert [len(step) for step in found] == [2, 3, 3, 4, 4, 4]


def test_a_lowered_number_of_tasks_holds_in_the_levels_after_it():
    found = ids(LEVELS, tasks(*[0] * 6, *[1] * 6), (0, 4), (1, 2), steps=6)
    assert [len(step) for step in found] == [4, 2, 2, 2, 2, 2]


async def constant(task):
    """Task a always succeeds, b and c as the model says."""
    said = await ask("first", f"say {task['letter']}")
    return 1.0 if task["letter"] == "a" else said.count("a") / 4


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (
            {"pool": "by:hard"},
            "curriculum.pool = 'by:hard' is not a number in every task; task a has None",
        ),
        ({"k_easy": 2}, "curriculum.k_easy = 2 was removed from the configuration"),
        ({"pool": "adaptive", "by": "hard"}, "curriculum.by = 'hard' was removed from the configuration"),
        ({"pool": "by:"}, "curriculum.pool = 'by:' is not one of"),
        ({"pool": "adaptive", "floor": 0.2}, "curriculum.floor = 0.2 was removed from the configuration"),
        ({"pool": "hard"}, "curriculum.pool = 'hard' is not one of"),
    ],
)
def test_wrong_curricula_are_found_before_anything_runs(trainer, curriculum, message):
    with pytest.raises(ConfigError, match=message):
        trainer(application(constant), TASKS, curriculum=curriculum)
    assert not (trainer.folder / "run").exists()
