"""An evaluation task by task: what each mode made of it, the tasks that got worse first."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.reading.evaluations import StoredEvaluation, TaskEnding


class EvaluatedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its ending in each mode that ran it. `change` is what it gained from one mode to another; None where
    one of the two has no figure for it."""

    task: str
    endings: Mapping[str, TaskEnding]
    change: float | None


def by_task(evaluation: StoredEvaluation, label: str, against: str) -> list[EvaluatedTask]:
    """All tasks of an evaluation: first those that lost most from the mode `against` to the mode `label`, in success,
    then in reward; of equal ones those that end worse in `label`, then by their ids."""
    modes = evaluation.evaluations
    solved = any(ending.success is not None for mode in modes.values() for ending in mode.endings.values())
    tasks = dict.fromkeys(task for mode in modes.values() for task in mode.endings)
    found = []
    for task in tasks:
        endings = {name: mode.endings[task] for name, mode in modes.items() if task in mode.endings}
        after, before = _value(endings.get(label), solved), _value(endings.get(against), solved)
        change = None if after is None or before is None else after - before
        gained = _gained(endings.get(label), endings.get(against))
        found.append(((change is None, change or 0.0, gained, after or 0.0, task), endings, change))
    found.sort(key=lambda one: one[0])
    return [EvaluatedTask(task=key[-1], endings=endings, change=change) for key, endings, change in found]


def _gained(after: TaskEnding | None, before: TaskEnding | None) -> float:
    if after is None or before is None or after.reward is None or before.reward is None:
        return 0.0
    return after.reward - before.reward


def _value(ending: TaskEnding | None, solved: bool) -> float | None:
    """What is compared: success where any episode reports it, of which a failed one is none; else the reward."""
    if ending is None:
        return None
    return float(ending.status == "ok" and ending.success is True) if solved else ending.reward
