"""An evaluation task by task: the ending of each task in every mode. Tasks that became worse come first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

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
    """All tasks of an evaluation, ordered by the change from the mode `against` to the mode `label`.

    The tasks that lost most come first: by success, then by reward. Equal tasks are ordered by their result in `label`,
    the worse first, then by their ids.
    """
    modes = evaluation.evaluations
    has_success = any(mode.successes for mode in modes.values())
    floor = min((modes[name].floor for name in (label, against) if name in modes), default=0.0)
    tasks: dict[str, None] = {}
    for mode in modes.values():
        tasks.update(dict.fromkeys(mode.endings))

    def figures_in(name: str, task: str) -> tuple[float | None, float | None]:
        endings = modes[name].by_task.get(task, ()) if name in modes else ()
        return _figures(endings, has_success, floor)

    keyed_rows: list[tuple[Any, EvaluatedTask]] = []
    for task in tasks:
        success_after, reward_after = figures_in(label, task)
        success_before, reward_before = figures_in(against, task)
        success_change = _difference(success_after, success_before)
        reward_change = _difference(reward_after, reward_before)
        change = success_change if has_success else reward_change
        endings = {name: mode.endings[task] for name, mode in modes.items() if task in mode.endings}
        row = EvaluatedTask(task=task, endings=endings, change=change)
        sort_key = (
            change is None,  # tasks without a figure in one of the two modes come last
            success_change or 0.0,
            reward_change or 0.0,
            success_after or 0.0,
            reward_after or 0.0,
            task,
        )
        keyed_rows.append((sort_key, row))
    return [row for _, row in sorted(keyed_rows, key=itemgetter(0))]


def _difference(after: float | None, before: float | None) -> float | None:
    """How much a figure rose; None if it is unknown before or after."""
    return None if after is None or before is None else after - before


def _figures(endings: Sequence[TaskEnding], has_success: bool, floor: float) -> tuple[float | None, float | None]:
    """Mean success and mean reward of the episodes of a task; None for a figure that is unknown or not reported.

    `floor` is the reward of failed episodes that have the lowest reward.
    """
    successes: list[float] = []
    rewards: list[float] = []
    for ending in endings:
        if not ending.known:
            continue
        if has_success and ending.solved is not None:
            successes.append(float(ending.solved))
        reward = floor if ending.floored else ending.reward
        if reward is not None:
            rewards.append(reward)
    return fmean(successes) if successes else None, fmean(rewards) if rewards else None


def tasks_of_kind(rows: Sequence[EvaluatedTask], kind: str) -> list[EvaluatedTask]:
    """The tasks that `lost`, `gained` or stayed the `same` from one mode to the other; all of them for an empty kind.

    A task without a figure in one of the two modes is in none of the three."""
    if not kind:
        return list(rows)
    return [row for row in rows if row.change is not None and KINDS[kind](row.change)]


def episodes_of_modes(run: OpenedRun, evaluation: StoredEvaluation, tasks: Sequence[str]) -> dict[tuple[str, str], str]:
    """The first episode of each of these tasks in each mode, by (task, mode); empty if the records are missing."""
    records = run.records_of(evaluation)
    if records is None or not tasks:
        return {}
    episodes = {}
    for mode in evaluation.evaluations:
        for task, episode in first_episodes(records, evaluation, mode, tasks).items():
            episodes[task, mode] = episode
    return episodes


def first_episodes(
    records: OpenedRun, evaluation: StoredEvaluation, mode: str, tasks: Sequence[str]
) -> Mapping[str, str]:
    """The first episode of each of these tasks in a mode; tasks without one are left out."""
    if not tasks:
        return {}
    return records.store.figures().first_episodes(*_recorded_under(evaluation, mode), tasks)


def failed_episode(records: OpenedRun, evaluation: StoredEvaluation, mode: str, task: str) -> str:
    """The first episode of a task in a mode that failed or did not solve it; empty if all solved it."""
    phase, step = _recorded_under(evaluation, mode)
    filters = EpisodeFilters(phase=phase, task=task, solved="no", training_step=step)
    lines = records.store.figures().episode_lines(filters, 1, "oldest")
    return str(lines[0].id) if lines else ""


def _recorded_under(evaluation: StoredEvaluation, mode: str) -> tuple[str, int | None]:
    """The phase and the training step under which the episodes of a mode are recorded."""
    if not evaluation.name.startswith(IN_TRAINING):
        return f"eval-{mode}", None
    if mode != "trained":
        return "eval", BEFORE
    return "eval", (evaluation.steps or 0) - 1
