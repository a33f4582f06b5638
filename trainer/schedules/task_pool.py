"""The tasks of each step: its own, and those that a refill takes in their place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.samples import Codes, Floats
from cotune.algorithms.task_signals import EVEN_SHARE, TaskFacts, chances
from cotune.records.plans import seed_of
from cotune.records.structs import Task
from cotune.trainer.config.curriculum import CurriculumConfig
from cotune.trainer.schedules.curriculum import schedule_of


class DrawnTasks(msgspec.Struct, frozen=True, array_like=True):
    """The ids of a step's own tasks, and of those that a refill takes, the first one first."""

    own: tuple[str, ...]
    reserve: tuple[str, ...] = ()


class TaskPool:
    """Draws the tasks of each step (from 0): even, as `schedule_of` has them, or adaptive, by `chances`.

    A draw depends on the tasks, the seed and the step, and in an adaptive pool on what is known of the tasks then, so
    the run keeps it until the step is done. `counts` is how many tasks a step takes, by the first step for which that
    holds, and `budget` the share of them that a refill may draw. A step takes no task twice, and all of them in their
    own order where it asks for all.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        config: CurriculumConfig,
        budget: float,
        seed: int,
        counts: Sequence[tuple[int, int]],
    ) -> None:
        self._tasks = tasks
        self._ids = [task.id for task in tasks]
        self._places = {name: i for i, name in enumerate(self._ids)}
        self._config = config
        self._budget = budget
        self._seed = seed
        self._even = schedule_of(tasks, config, seed, counts)
        more = [(first, count + extra_tasks(budget, count)) for first, count in counts]
        self._reserve = schedule_of(tasks, config, seed_of(seed, "refill"), more) if budget else None
        self._counts = sorted(counts)

    def draw(self, step: int, known: Mapping[str, TaskFacts], roles: Collection[str]) -> DrawnTasks:
        """The tasks of `step`, by what is `known` of them for the trained `roles`."""
        if self._config.pool == "adaptive":
            own = [count for first, count in self._counts if first <= step][-1]
            if own >= len(self._ids):
                return DrawnTasks(tuple(self._ids))
            order = in_order(chances(self._places, known, roles, EVEN_SHARE), [self._seed, step])
            drawn = [self._ids[i] for i in order[: own + extra_tasks(self._budget, own)].tolist()]
            return DrawnTasks(tuple(drawn[:own]), tuple(drawn[own:]))
        own_ids = tuple(task.id for task in self._even.of(step))
        if self._reserve is None:
            return DrawnTasks(own_ids)
        others = [task.id for task in self._reserve.of(step) if task.id not in own_ids]
        return DrawnTasks(own_ids, tuple(others[: extra_tasks(self._budget, len(own_ids))]))

    def named(self, ids: Iterable[str]) -> list[Task]:
        """The tasks with these ids."""
        return [self._tasks[self._places[name]] for name in ids]

    def level(self, step: int) -> int:
        """Equal for steps that take from the same tasks."""
        return self._even.level(step)


def extra_tasks(budget: float, own: int) -> int:
    """The most tasks that a refill draws in a step with so many of its own."""
    return math.ceil(round(budget * own, 9))


def in_order(weights: Floats, seed: Sequence[int]) -> Codes:
    """[tasks] their places in the order in which they are drawn with these chances, none put back."""
    times = np.random.default_rng(seed).exponential(size=len(weights))  # the first of them is drawn first
    return np.argsort(times / weights, kind="stable")
