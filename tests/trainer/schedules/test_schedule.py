"""Which tasks a step takes."""

from __future__ import annotations

from collections import Counter

import pytest

from cotune.records.structs import Task
from cotune.trainer.schedules.schedule import TaskSchedule


def schedule(tasks: int, *counts: tuple[int, int], seed: int = 0) -> TaskSchedule:
    return TaskSchedule([Task(id=str(i), input=i) for i in range(tasks)], seed, counts)


@pytest.mark.parametrize(("tasks", "count"), [(10, 3), (7, 5), (5, 4), (8, 4), (3, 2), (100, 32)])
@pytest.mark.parametrize("seed", range(3))
def test_every_pass_takes_every_task_once_and_no_step_takes_one_twice(tasks: int, count: int, seed: int) -> None:
    """Also a step at the border of two passes, whose first tasks were skipped in the second."""
    made = schedule(tasks, (0, count), seed=seed)
    steps = [[task.input for task in made.of(step)] for step in range(3 * tasks)]
    drawn = [task for step in steps for task in step]
    for step in steps:
        assert len(set(step)) == len(step) == count
    for start in range(0, len(drawn), tasks):
        assert Counter(drawn[start : start + tasks]) == Counter(range(tasks))
    assert tasks < 7 or drawn[:tasks] != drawn[tasks : 2 * tasks]


def test_a_resumed_schedule_repeats_and_a_changed_count_goes_on_in_the_same_pass() -> None:
    whole, changed = schedule(10, (0, 3)), schedule(10, (0, 3), (2, 4))
    assert [changed.of(step) for step in (1, 0)] == [whole.of(1), whole.of(0)]
    drawn = [task.input for step in range(3) for task in changed.of(step)]
    assert sorted(drawn) == list(range(10))
    assert schedule(10, (0, 3), (2, 4)).of(7) == changed.of(7)


def test_a_step_for_more_tasks_than_there_are_takes_all_once() -> None:
    assert [task.input for task in schedule(3, (0, 5)).of(4)] == [0, 1, 2]
