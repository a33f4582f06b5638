"""Curricula: tasks from easy to hard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotune.config.rollouts import CurriculumConfig
from cotune.errors import ConfigError
from cotune.records.structs import Task
from cotune.trainer.schedules.schedule import Schedule, TaskSchedule


class Curriculum:
    """The tasks of each step (from 0): one level after the other, from the easiest, then all tasks.

    Each level, and all tasks at the end, gets an equal part of the run's `steps`, at least one step. `TaskSchedule`
    draws within a level. The result depends only on the tasks, the seed and the step, so a resumed run repeats it.
    """

    def __init__(
        self, tasks: Sequence[Task], by: str, steps: int, seed: int, counts: Sequence[tuple[int, int]]
    ) -> None:
        """Group `tasks` by the number in their field `by`. `counts` has the number of tasks of a step, as (first step
        with this number, number)."""
        levels: dict[float, list[Task]] = {}
        for task in tasks:
            levels.setdefault(_level(task, by), []).append(task)
        parts = [*(levels[level] for level in sorted(levels)), tasks]
        self._level_steps = max(1, steps // len(parts))
        self._parts = []
        for number, part in enumerate(parts):
            # Each level counts its steps from 0. Of several counts from before it, the last one holds.
            first_step = number * self._level_steps
            counts_of_level = {max(0, first - first_step): count for first, count in sorted(counts)}
            self._parts.append(TaskSchedule(part, seed, [*counts_of_level.items()]))

    def of(self, step: int) -> list[Task]:
        """Return the tasks of `step`."""
        level = self.level(step)
        return self._parts[level].of(step - level * self._level_steps)

    def level(self, step: int) -> int:
        """Return the number of the level of `step`; the last one stands for all tasks."""
        return min(step // self._level_steps, len(self._parts) - 1)


def schedule_of(
    tasks: Sequence[Task], config: CurriculumConfig, steps: int, seed: int, counts: Sequence[tuple[int, int]]
) -> Schedule[Task]:
    """Return the schedule of tasks for a run with this number of steps. Raises ConfigError as `check_curriculum`."""
    if not config.by:
        return TaskSchedule(tasks, seed, counts)
    return Curriculum(tasks, config.by, steps, seed, counts)


def check_curriculum(config: CurriculumConfig, tasks: Sequence[Task]) -> None:
    """Raise ConfigError for tasks without a number for their difficulty."""
    if config.by:
        for task in tasks:
            _level(task, config.by)


def _level(task: Task, by: str) -> float:
    """The difficulty of a task: the number in the field `by` of its input. Raises ConfigError if it has none."""
    difficulty: Any = task.input.get(by) if isinstance(task.input, Mapping) else None
    if isinstance(difficulty, bool) or not isinstance(difficulty, int | float):
        remedy = "Give every task a number there, or leave curriculum.pool out."
        raise ConfigError(
            "curriculum.pool",
            f"by:{by}",
            f"is not a number in every task; task {task.id} has {difficulty!r}",
            remedy,
        )
    return float(difficulty)
