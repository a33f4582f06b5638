"""Curricula: tasks from easy to hard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotune.config.rollouts import CurriculumConfig
from cotune.errors import ConfigError
from cotune.records.structs import Task
from cotune.trainer.schedules.schedule import Schedule, TaskSchedule


class Curriculum:
    """The tasks of each step (from 0): those of one level after the other, from the easiest, then all of them. Each
    level, and all tasks at the end, has an equal part of the run's `steps`, at least one. Within a level as
    `TaskSchedule` draws them.

    A function of the tasks, the seed and the step alone, so a resumed run repeats it.
    """

    def __init__(
        self, tasks: Sequence[Task], by: str, steps: int, seed: int, counts: Sequence[tuple[int, int]]
    ) -> None:
        levels: dict[float, list[Task]] = {}
        for task in tasks:
            levels.setdefault(_level(task, by), []).append(task)
        parts = [*(levels[level] for level in sorted(levels)), tasks]
        self._level_steps = max(1, steps // len(parts))
        self._parts = []
        for number, part in enumerate(parts):
            first_step = number * self._level_steps
            own_counts = {max(0, first - first_step): count for first, count in sorted(counts)}
            self._parts.append(TaskSchedule(part, seed, [*own_counts.items()]))

    def of(self, step: int) -> list[Task]:
        """The tasks of `step`."""
        level = self.level(step)
        return self._parts[level].of(step - level * self._level_steps)

    def level(self, step: int) -> int:
        """The number of the level that `step` takes its tasks from; the last one is all of them."""
        return min(step // self._level_steps, len(self._parts) - 1)


def schedule_of(
    tasks: Sequence[Task], config: CurriculumConfig, steps: int, seed: int, counts: Sequence[tuple[int, int]]
) -> Schedule[Task]:
    """The schedule of the tasks of a run with so many steps. Raises ConfigError as `check_curriculum`."""
    if not config.by:
        return TaskSchedule(tasks, seed, counts)
    return Curriculum(tasks, config.by, steps, seed, counts)


def check_curriculum(config: CurriculumConfig, tasks: Sequence[Task]) -> None:
    """Raises ConfigError for tasks that do not say how hard they are."""
    if config.by:
        for task in tasks:
            _level(task, config.by)


def _level(task: Task, by: str) -> float:
    found: Any = task.input.get(by) if isinstance(task.input, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        remedy = "Give every task a number there, or leave curriculum.by out."
        raise ConfigError(
            "curriculum.by",
            by,
            f"is not a number in every task; task {task.id} has {found!r}",
            remedy,
        )
    return float(found)
