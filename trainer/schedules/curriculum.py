"""Curricula: tasks from easy to hard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotune.config.rollouts import CurriculumConfig
from cotune.errors import ConfigError
from cotune.records.structs import Task
from cotune.trainer.schedules.schedule import Schedule, TaskSchedule


class Curriculum:
    """The tasks of each step (from 0): first of the easiest level, then of the next one, and at last all tasks.

    Each level, and the last part with all tasks, gets an equal share of the run's `steps`, at least one step.
    `TaskSchedule` draws within a level. The result depends only on the tasks, the seed and the step, so a resumed run
    repeats it.
    """

    def __init__(
        self, tasks: Sequence[Task], by: str, steps: int, seed: int, counts: Sequence[tuple[int, int]]
    ) -> None:
        """Group `tasks` by their difficulty, the number in their field `by`.

        `counts` has the numbers of tasks per step, each with the first step that it holds for: (step, tasks).
        """
        tasks_of_difficulty: dict[float, list[Task]] = {}
        for task in tasks:
            tasks_of_difficulty.setdefault(_difficulty(task, by), []).append(task)
        tasks_of_level = [tasks_of_difficulty[difficulty] for difficulty in sorted(tasks_of_difficulty)]
        tasks_of_level.append(list(tasks))  # the last level has all tasks

        # All levels get equally many steps.
        self._steps_per_level = max(1, steps // len(tasks_of_level))
        self._schedules: list[TaskSchedule[Task]] = []
        for level, level_tasks in enumerate(tasks_of_level):
            # The schedule of a level counts its steps from 0. All counts that begin before the level fall on its step
            # 0, where the latest one overwrites the others.
            start = level * self._steps_per_level
            counts_in_level = {max(0, first - start): count for first, count in sorted(counts)}
            self._schedules.append(TaskSchedule(level_tasks, seed, list(counts_in_level.items())))

    def of(self, step: int) -> list[Task]:
        """Return the tasks of `step`."""
        level = self.level(step)
        return self._schedules[level].of(step - level * self._steps_per_level)

    def level(self, step: int) -> int:
        """Return the level of `step`, from 0. The last level has all tasks."""
        return min(step // self._steps_per_level, len(self._schedules) - 1)


def schedule_of(
    tasks: Sequence[Task], config: CurriculumConfig, steps: int, seed: int, counts: Sequence[tuple[int, int]]
) -> Schedule[Task]:
    """Return the schedule of tasks for a run with this number of steps. Raises ConfigError as `check_curriculum`."""
    if not config.by:
        return TaskSchedule(tasks, seed, counts)
    return Curriculum(tasks, config.by, steps, seed, counts)


def check_curriculum(config: CurriculumConfig, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if a task has no number for its difficulty."""
    if config.by:
        for task in tasks:
            _difficulty(task, config.by)


def _difficulty(task: Task, by: str) -> float:
    """Return the difficulty of a task: the number in the field `by` of its input. Raises ConfigError if it has none."""
    difficulty: Any = task.input.get(by) if isinstance(task.input, Mapping) else None
    if isinstance(difficulty, bool) or not isinstance(difficulty, int | float):
        remedy = f"Give the input of every task a number in {by!r}, or leave curriculum.pool out."
        raise ConfigError(
            "curriculum.pool",
            f"by:{by}",
            f"is not a number in every task; task {task.id} has {difficulty!r}",
            remedy,
        )
    return float(difficulty)
