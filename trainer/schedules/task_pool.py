"""The tasks of each step: its own, and those that a refill takes in their place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.samples import Floats
from cotune.algorithms.task_signals import EVEN_SHARE, TaskFacts, chances
from cotune.config.rollouts import CurriculumConfig
from cotune.records.plans import seed_of
from cotune.records.structs import Task
from cotune.trainer.schedules.curriculum import schedule_of


class DrawnTasks(msgspec.Struct, frozen=True, array_like=True):
    """The ids of a step's own tasks, and of those that a refill takes, the first one first."""

    own: tuple[str, ...]
    reserve: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    """One over the chance that each of `own` had of being drawn; empty if all had the same."""

    @property
    def task_weights(self) -> dict[str, float]:
        """The weight of each own task in the mean reward of the step, so that this mean is an estimate of the mean over
        all tasks. Tasks of a refill have none: how many it takes depends on their rewards."""
        return dict(zip(self.own, self.weights or [1.0] * len(self.own), strict=True))


class TaskPool:
    """Draws the tasks of each step (from 0): even, as `schedule_of` has them, or adaptive, by `chances`.

    A draw depends on the tasks, the seed and the step, and in an adaptive pool on what is known of the tasks then, so
    the run keeps it until the step is done. `counts` is how many tasks a step takes, by the first step for which that
    holds, `steps` the length of the run, and `budget` the share of a step's tasks that a refill may draw. A step takes
    no task twice, and all of them in their own order if it asks for all.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        config: CurriculumConfig,
        budget: float,
        seed: int,
        counts: Sequence[tuple[int, int]],
        steps: int,
    ) -> None:
        self._tasks = tasks
        self._ids = [task.id for task in tasks]
        self._places = {name: i for i, name in enumerate(self._ids)}
        self._config = config
        self._budget = budget
        self._seed = seed
        self._even = schedule_of(tasks, config, steps, seed, counts)
        more = [(first, count + extra_tasks(budget, count)) for first, count in counts]
        self._reserve = schedule_of(tasks, config, steps, seed_of(seed, "refill"), more) if budget else None
        self._counts = sorted(counts)

    def draw(self, step: int, known: Mapping[str, TaskFacts], roles: Collection[str]) -> DrawnTasks:
        """The tasks of `step`, by what is `known` of them for the trained `roles`."""
        if self._config.pool == "adaptive":
            own = [count for first, count in self._counts if first <= step][-1]
            if own >= len(self._ids):
                return DrawnTasks(tuple(self._ids))
            chance = chances(self._places, known, roles, EVEN_SHARE)
            times = arrivals(chance, [self._seed, step])
            order = np.argsort(times, kind="stable")
            drawn = [self._ids[i] for i in order[: own + extra_tasks(self._budget, own)].tolist()]
            # A task is drawn if it arrives before the first one that is not. Given that time, its chance is this
            # (Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches", section 4).
            included = -np.expm1(-chance[order[:own]] * times[order[own]])
            return DrawnTasks(tuple(drawn[:own]), tuple(drawn[own:]), tuple((1.0 / included).tolist()))
        own_ids = tuple(task.id for task in self._even.of(step))
        if self._reserve is None:
            return DrawnTasks(own_ids)
        others = [task.id for task in self._reserve.of(step) if task.id not in own_ids]
        # If the two together ask for all tasks, these come in the order of the file: draw among them at random.
        order = np.random.default_rng([seed_of(self._seed, "refill"), step]).permutation(len(others))
        reserve = [others[i] for i in order[: extra_tasks(self._budget, len(own_ids))].tolist()]
        return DrawnTasks(own_ids, tuple(reserve))

    def named(self, ids: Iterable[str]) -> list[Task]:
        """The tasks with these ids."""
        return [self._tasks[self._places[name]] for name in ids]

    def level(self, step: int) -> int:
        """Equal for steps that take from the same tasks."""
        return self._even.level(step)


def extra_tasks(budget: float, own: int) -> int:
    """The most tasks that a refill draws in a step with so many of its own."""
    return math.ceil(round(budget * own, 9))


def arrivals(weights: Floats, seed: Sequence[int]) -> Floats:
    """[tasks] a random time for each: tasks in the order of these times are drawn by `weights`, none put back."""
    times: Floats = np.random.default_rng(seed).exponential(size=len(weights)) / weights
    return times
