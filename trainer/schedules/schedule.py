"""Which tasks a step takes, and its learning rate: functions of seed and step alone, so a resumed run repeats them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from cotune.config.learner import ScheduleConfig

Item = TypeVar("Item")


class Levels(Protocol):
    """Which steps compare with each other."""

    def level(self, step: int) -> int:
        """Equal for steps that take from the same tasks."""
        ...


class Schedule(Levels, Protocol[Item]):
    """What each step of a run takes."""

    def of(self, step: int) -> list[Item]:
        """What `step` (from 0) takes."""
        ...


class TaskSchedule(Generic[Item]):
    """The tasks (or recorded episodes) of each step (from 0): passes over all, each in a new random order.

    Every task comes once in every pass, and at most once in a step: a step at the border of two passes takes what is
    left of the one, then the first of the other that it does not have yet, which keeps the rest of its order. A step
    that asks for as many tasks as there are, or more, takes all once, in their own order.

    `counts` is how many tasks a step takes, by the first step for which that holds.
    """

    def __init__(self, tasks: Sequence[Item], seed: int, counts: Sequence[tuple[int, int]]) -> None:
        self._tasks = tasks
        self._seed = seed
        self._counts = sorted(counts)
        self._drawn: list[list[int]] = []
        self._left: list[int] = []
        self._passes = 0

    def of(self, step: int) -> list[Item]:
        """The tasks of `step`."""
        while (at := len(self._drawn)) <= step:
            self._drawn.append(self._draw([count for first, count in self._counts if first <= at][-1]))
        return [self._tasks[index] for index in self._drawn[step]]

    def level(self, step: int) -> int:
        """All steps take from the same tasks."""
        return 0

    def _draw(self, count: int) -> list[int]:
        if count >= len(self._tasks):
            return list(range(len(self._tasks)))
        taken, self._left = self._left[:count], self._left[count:]
        if len(taken) < count:
            order = np.random.default_rng([self._seed, self._passes]).permutation(len(self._tasks)).tolist()
            self._passes += 1
            have = set(taken)
            fresh = [index for index in order if index not in have][: count - len(taken)]
            taken, have = [*taken, *fresh], set(fresh)
            self._left = [index for index in order if index not in have]
        return taken


def lr_scale(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Factor on the learning rate at step `step` (from 0) of `steps`; above 0 at every step."""
    left = 1.0 - step / steps
    if schedule.kind == "linear":
        return left
    if schedule.kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * left))
    return 1.0
