"""The tasks of each step: its first tasks, and a reserve for its refill."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.samples import Floats
from cotune.algorithms.task_signals import EVEN_SHARE, TaskFacts, task_chances
from cotune.config.rollouts import CurriculumConfig
from cotune.records.plans import seed_of
from cotune.records.structs import Task
from cotune.trainer.schedules.curriculum import schedule_of
from cotune.trainer.schedules.schedule import Schedule, count_at


class DrawnTasks(msgspec.Struct, frozen=True, array_like=True):
    """The ids of the tasks that were drawn for a step."""

    own: tuple[str, ...]
    """The step's first tasks."""
    reserve: tuple[str, ...] = ()
    """The tasks for its refill, in their order."""
    weights: tuple[float, ...] = ()
    """One over the chance of each task in `own` of being drawn; empty if all chances were equal."""

    @property
    def task_weights(self) -> dict[str, float]:
        """The weight of each task in `own` in the mean reward of the step. With these weights, it estimates the mean
        over all tasks. Tasks of a refill have none, because their number depends on rewards."""
        return dict(zip(self.own, self.weights or [1.0] * len(self.own), strict=True))


class TaskPool:
    """Draws the tasks of each step (from 0): evenly, by `schedule_of`, or in an adaptive pool by `task_chances`.

    A draw depends on the tasks, the seed and the step. In an adaptive pool it also depends on the results of the tasks
    so far, so the run stores it until the step is done. A step has no task twice. If it needs all tasks, they come in
    their original order.
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
        """Prepare the even schedules of the first tasks, and of the reserve for refills.

        `budget` is the share of a step's tasks that a refill may draw, and `steps` the length of the run. `counts` has
        the numbers of tasks per step, each with the first step that it holds for: (step, tasks).
        """
        self._tasks = tasks
        self._ids = [task.id for task in tasks]
        self._places = {name: i for i, name in enumerate(self._ids)}
        self._config = config
        self._budget = budget
        self._seed = seed
        self._even = schedule_of(tasks, config, steps, seed, counts)
        self._reserve: Schedule[Task] | None = None
        if budget:
            # Large enough for a refill, even if all first tasks of the step are in it.
            counts_with_refill = [(first, count + extra_tasks(budget, count)) for first, count in counts]
            self._reserve = schedule_of(tasks, config, steps, seed_of(seed, "refill"), counts_with_refill)
        self._counts = sorted(counts)

    def draw(self, step: int, facts: Mapping[str, TaskFacts], roles: Collection[str]) -> DrawnTasks:
        """Draw the tasks of `step`, and a reserve for its refill.

        An adaptive pool draws by the results so far (`facts`) of the trained `roles`. Others take all tasks equally
        often.
        """
        if self._config.pool == "adaptive":
            return self._draw_adaptive(step, facts, roles)
        first_ids = tuple(task.id for task in self._even.of(step))
        if self._reserve is None:  # the run has no refill
            return DrawnTasks(first_ids)
        others = [task.id for task in self._reserve.of(step) if task.id not in first_ids]
        # A schedule that needs all tasks has them in the order of the file, so draw among them at random.
        order = np.random.default_rng([seed_of(self._seed, "refill"), step]).permutation(len(others))
        reserve_size = extra_tasks(self._budget, len(first_ids))
        reserve = [others[index] for index in order[:reserve_size].tolist()]
        return DrawnTasks(first_ids, tuple(reserve))

    def _draw_adaptive(self, step: int, facts: Mapping[str, TaskFacts], roles: Collection[str]) -> DrawnTasks:
        """Draw tasks at random, with higher chances for tasks whose rewards still differ (`task_chances`).

        The weight of a task is one over its chance of being drawn.
        """
        count = count_at(self._counts, step)
        # The step takes all tasks. None is left for a refill, and each has the chance 1, so none needs a weight.
        if count >= len(self._ids):
            return DrawnTasks(tuple(self._ids))

        # Draw without replacement: each task gets a random time, which is on average earlier if its chance is higher.
        # The earliest tasks are for the step, and the next ones for its refill.
        relative_chances = task_chances(self._places, facts, roles, EVEN_SHARE)  # [tasks]
        times = arrivals(relative_chances, [self._seed, step])  # [tasks]
        order = np.argsort(times, kind="stable")
        first, others = order[:count], order[count:]
        for_refill = others[: extra_tasks(self._budget, count)]

        # A task is drawn if its time is before the time of the first task that is not drawn. Given the latter, this is
        # its chance (Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches", section 4).
        chances = -np.expm1(-relative_chances[first] * times[others[0]])
        return DrawnTasks(
            own=tuple(self._ids[index] for index in first),
            reserve=tuple(self._ids[index] for index in for_refill),
            weights=tuple((1.0 / chances).tolist()),
        )

    def named(self, ids: Iterable[str]) -> list[Task]:
        """Return the tasks with these ids."""
        return [self._tasks[self._places[name]] for name in ids]

    def level(self, step: int) -> int:
        """Return a number that is equal for steps whose tasks come from the same set."""
        return self._even.level(step)


def extra_tasks(budget: float, first_tasks: int) -> int:
    """Return the most tasks that a refill draws in a step with this number of first tasks."""
    return math.ceil(round(budget * first_tasks, 9))  # rounded, because 0.07 * 100 is slightly more than 7


def arrivals(weights: Floats, seed: Sequence[int]) -> Floats:
    """Return a random time for each task, [tasks]. The order of these times draws tasks by `weights`, without
    replacement."""
    times: Floats = np.random.default_rng(seed).exponential(size=len(weights)) / weights
    return times
