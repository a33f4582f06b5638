"""An evaluation task by task: the ending of each in every mode, the tasks that got worse first."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.reading.evaluations import StoredEvaluation, TaskEnding


class EvaluatedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its ending in each mode that ran it. `change` is its gain from one mode to another; None where
    one of the two has no figure for it."""

    task: str
    endings: Mapping[str, TaskEnding]
    change: float | None


def by_task(evaluation: StoredEvaluation, label: str, against: str) -> list[EvaluatedTask]:
    """All tasks of an evaluation: first those that lost most from the mode `against` to the mode `label`, in success,
    then in reward; of equal ones those that end worse in `label`, then by their ids."""
    modes = evaluation.evaluations
    endings = [ending for mode in modes.values() for ending in mode.endings.values()]
    solved = any(ending.success is not None for ending in endings)
    floor = min((modes[name].floor for name in (label, against) if name in modes), default=0.0)
    found = []
    for task in dict.fromkeys(task for mode in modes.values() for task in mode.endings):
        ends = {name: mode.endings[task] for name, mode in modes.items() if task in mode.endings}
        after, before = (_figures(ends.get(name), solved, floor) for name in (label, against))
        changes = [None if a is None or b is None else a - b for a, b in zip(after, before, strict=True)]
        change = changes[0] if solved else changes[1]
        order = (change is None, changes[0] or 0.0, changes[1] or 0.0, after[0] or 0.0, after[1] or 0.0, task)
        found.append((order, EvaluatedTask(task=task, endings=ends, change=change)))
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def _figures(ending: TaskEnding | None, solved: bool, floor: float) -> tuple[float | None, float | None]:
    """Success (a failed episode has none) and reward; None for a figure that is unknown or not reported."""
    if ending is None or not ending.known:
        return None, None
    success = None if not solved or ending.solved is None else float(ending.solved)
    return success, floor if ending.floored else ending.reward
