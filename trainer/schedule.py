"""Which tasks a step takes, and its learning rate: pure functions of seed and step, so a resumed run repeats them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cotune.records import Task
from cotune.trainer.config import ScheduleConfig


def tasks_of_step(tasks: Sequence[Task], step: int, count: int, seed: int) -> list[Task]:
    """`count` tasks for step `step` (from 0): passes over all tasks, each in a new random order.

    A task appears at most once in a step unless there are fewer than `count` tasks; then the step takes all once.
    """
    if count >= len(tasks):
        return list(tasks)
    chosen: dict[int, None] = {}
    position = step * count
    while len(chosen) < count:
        epoch, offset = divmod(position, len(tasks))
        order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
        for index in order[offset : offset + count - len(chosen)]:
            chosen[int(index)] = None
        position = (epoch + 1) * len(tasks)
    return [tasks[index] for index in chosen]


def lr_scale(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Factor on the learning rate at step `step` (from 0) of `steps`; above 0 at every step."""
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    left = 1.0 - (step - schedule.warmup) / max(steps - schedule.warmup, 1)
    if schedule.kind == "linear":
        return left
    if schedule.kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * left))
    return 1.0
