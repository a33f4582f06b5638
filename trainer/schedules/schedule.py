"""The tasks of a step, and its learning rate. They depend only on seed and step, so a resumed run repeats them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from cotune.config.learner import ScheduleConfig

Item = TypeVar("Item")


class Levels(Protocol):
    """The level of each step: figures of steps can be compared if they have the same level."""

    def level(self, step: int) -> int:
        """Return a number that is equal for steps whose tasks come from the same set."""
        ...


class Schedule(Levels, Protocol[Item]):
    """The tasks (or recorded episodes) of each step of a run."""

    def of(self, step: int) -> list[Item]:
        """Return the tasks of `step` (from 0)."""
        ...


class TaskSchedule(Generic[Item]):
    """The tasks (or recorded episodes) of each step (from 0): passes over all tasks, each in a new random order.

    Every task comes once in every pass, and at most once in a step. A step at the border of two passes takes the last
    tasks of one pass, then the first tasks of the next pass that it does not have yet. A step that needs all tasks, or
    more than there are, takes each once, in their original order.
    """

    def __init__(self, tasks: Sequence[Item], seed: int, counts: Sequence[tuple[int, int]]) -> None:
        """Schedule `tasks` in an order that depends on `seed` only.

        `counts` has the numbers of tasks per step, each with the first step that it holds for: (step, tasks).
        """
        self._tasks = tasks
        self._seed = seed
        self._counts = sorted(counts)
        self._drawn: list[list[int]] = []
        """The indices of the tasks of each step so far."""
        self._rest_of_pass: list[int] = []
        """The indices of the tasks that the present pass still has to give, in its order."""
        self._passes = 0

    def of(self, step: int) -> list[Item]:
        """Return the tasks of `step`."""
        # Steps are drawn in order, as each takes the next tasks of a pass.
        while len(self._drawn) <= step:
            next_step = len(self._drawn)
            self._drawn.append(self._draw(count_at(self._counts, next_step)))
        return [self._tasks[index] for index in self._drawn[step]]

    def level(self, step: int) -> int:
        """Return 0: all steps take from the same tasks."""
        return 0

    def _draw(self, count: int) -> list[int]:
        """Draw the indices of the next `count` tasks from the present pass, and if it ends, from a new pass."""
        # All tasks once, in their original order. The pass stays where it is.
        if count >= len(self._tasks):
            return list(range(len(self._tasks)))
        drawn = self._rest_of_pass[:count]
        self._rest_of_pass = self._rest_of_pass[count:]
        if len(drawn) == count:
            return drawn

        # Begin the next pass with tasks that this step does not have yet.
        order = np.random.default_rng([self._seed, self._passes]).permutation(len(self._tasks)).tolist()
        self._passes += 1
        of_old_pass = set(drawn)
        others = [index for index in order if index not in of_old_pass]
        of_new_pass = others[: count - len(drawn)]
        used = set(of_new_pass)
        self._rest_of_pass = [index for index in order if index not in used]
        return drawn + of_new_pass


def count_at(counts: Sequence[tuple[int, int]], step: int) -> int:
    """Return the number of tasks of a step. `counts` has (first step, tasks per step), sorted by step."""
    tasks_per_step = 0
    for first_step, tasks in counts:
        if first_step <= step:
            tasks_per_step = tasks
    return tasks_per_step


def lr_scale(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the factor on the learning rate at step `step` (from 0) of `steps`; it is above 0 at every step."""
    remaining = 1.0 - step / steps
    if schedule.kind == "linear":
        return remaining
    if schedule.kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * remaining))
    return 1.0
