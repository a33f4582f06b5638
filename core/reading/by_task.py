"""An evaluation task by task: the ending of each in every mode, the tasks that got worse first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from cotune.reading.evaluations import IN_TRAINING, StoredEvaluation, TaskEnding
from cotune.reading.run import OpenedRun
from cotune.storage.episode_filters import EpisodeFilters

KINDS: Mapping[str, Callable[[float], bool]] = {
    "lost": lambda change: change < 0,
    "gained": lambda change: change > 0,
    "same": lambda change: change == 0,
}
"""Kinds of tasks by their change from one mode to another."""

BEFORE = -1
"""The step under which training records its evaluation before the first one."""


class EvaluatedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task with the ending of its first episode in each mode that ran it. `change` is the gain, over all of its
    episodes, from one mode to another; None if one of the two has no figure for it."""

    task: str
    endings: Mapping[str, TaskEnding]
    change: float | None


def by_task(evaluation: StoredEvaluation, label: str, against: str) -> list[EvaluatedTask]:
    """All tasks of an evaluation: first those that lost most from the mode `against` to the mode `label`, in success,
    then in reward; of equal ones those that end worse in `label`, then by their ids."""
    modes = evaluation.evaluations
    solved = any(mode.successes for mode in modes.values())
    floor = min((modes[name].floor for name in (label, against) if name in modes), default=0.0)
    found = []
    for task in dict.fromkeys(task for mode in modes.values() for task in mode.endings):
        ends = {name: mode.endings[task] for name, mode in modes.items() if task in mode.endings}
        played = [modes[name].by_task.get(task, ()) if name in modes else () for name in (label, against)]
        after, before = (_figures(endings, solved, floor) for endings in played)
        changes = [None if a is None or b is None else a - b for a, b in zip(after, before, strict=True)]
        change = changes[0] if solved else changes[1]
        order = (change is None, changes[0] or 0.0, changes[1] or 0.0, after[0] or 0.0, after[1] or 0.0, task)
        found.append((order, EvaluatedTask(task=task, endings=ends, change=change)))
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def _figures(endings: Sequence[TaskEnding], solved: bool, floor: float) -> tuple[float | None, float | None]:
    """Mean success and mean reward of the episodes of a task; None for a figure that is unknown or not reported."""
    known = [ending for ending in endings if ending.known]
    successes = [float(ending.solved) for ending in known if solved and ending.solved is not None]
    rewards = [floor if ending.floored else ending.reward for ending in known]
    reported = [reward for reward in rewards if reward is not None]
    return fmean(successes) if successes else None, fmean(reported) if reported else None


def tasks_of_kind(rows: Sequence[EvaluatedTask], kind: str) -> list[EvaluatedTask]:
    """The tasks that `lost`, `gained` or stayed the `same` from one mode to the other; all of them for an empty kind.

    A task without a figure in one of the two modes is in none of the three."""
    if not kind:
        return list(rows)
    return [row for row in rows if row.change is not None and KINDS[kind](row.change)]


def episodes_of_modes(run: OpenedRun, evaluation: StoredEvaluation, tasks: Sequence[str]) -> dict[tuple[str, str], str]:
    """The first episode of each of these tasks in each mode, by (task, mode); empty where they were not kept."""
    records = run.records_of(evaluation)
    if records is None or not tasks:
        return {}
    found = {}
    for mode in evaluation.evaluations:
        for task, episode in first_episodes(records, evaluation, mode, tasks).items():
            found[task, mode] = episode
    return found


def first_episodes(
    records: OpenedRun, evaluation: StoredEvaluation, mode: str, tasks: Sequence[str]
) -> Mapping[str, str]:
    """The first episode of each of these tasks in a mode; tasks without one are left out."""
    if not tasks:
        return {}
    return records.store.figures().first_episodes(*_recorded_under(evaluation, mode), tasks)


def failed_episode(records: OpenedRun, evaluation: StoredEvaluation, mode: str, task: str) -> str:
    """The first episode of a task in a mode that failed or did not solve it; empty where there is none."""
    phase, step = _recorded_under(evaluation, mode)
    filters = EpisodeFilters(phase=phase, task=task, solved="no", training_step=step)
    lines = records.store.figures().episode_lines(filters, 1, "oldest")
    return str(lines[0].id) if lines else ""


def _recorded_under(evaluation: StoredEvaluation, mode: str) -> tuple[str, int | None]:
    """The phase and the training step, as records number it, of the episodes of a mode."""
    if not evaluation.name.startswith(IN_TRAINING):
        return f"eval-{mode}", None
    return "eval", (evaluation.steps or 0) - 1 if mode == "trained" else BEFORE
