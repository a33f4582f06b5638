"""The tasks that a run failed, the worst first, with question, answer, expected answer and error.

A task is judged by the episodes that say most of the run: those of its evaluation, of the best prompts on held-out
tasks, of its last training step, or else the latest recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import msgspec

from cotune.reading.by_task import failed_episode, first_episodes
from cotune.reading.evaluations import StoredEvaluation, most_telling
from cotune.reading.exchange import Exchange, exchanges
from cotune.reading.headline import Headline, compared_modes
from cotune.reading.prompt_search import HELD_OUT_PHASE, PHASES, best_prompts
from cotune.reading.run import OpenedRun
from cotune.reading.task_sets import evaluated_set
from cotune.records.structs import JUDGING, REFLECTING
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.tables import first_line

MOST_EPISODES = 2000
"""Episodes that are looked at, the latest ones, so that a store of millions is as quick."""

NO_TASKS = ("check", JUDGING, REFLECTING)
"""Phases of episodes that are no run of the application on a task."""


class EndedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode ended. `success` and `reward` are None where unknown; `id` is empty if it was not recorded."""

    id: str
    task: str
    success: float | None
    reward: float | None
    error: str


class FailedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was failed: means over its `runs`, and one of its failed episodes."""

    task: str
    runs: int
    success: float | None
    reward: float | None
    error: str
    episode: str
    exchange: Exchange


class FailedTasks(msgspec.Struct, frozen=True, kw_only=True):
    """The worst of `total` failed tasks among `known` ones. Without any `success`, `measure` is `reward`, and the tasks
    are those that failed or have less than the highest reward. `source` names the episodes, which the run `place`
    holds."""

    tasks: tuple[FailedTask, ...]
    total: int
    known: int
    measure: Literal["success", "reward"]
    source: str
    place: str

    @property
    def title(self) -> str:
        """The headline of the list."""
        return "Failed tasks, worst first" if self.measure == "success" else "Tasks with the lowest reward"


def failed_tasks(run: OpenedRun, headline: Headline, most: int) -> FailedTasks | None:
    """The `most` worst tasks of a run with this headline; None for a run whose episodes say nothing of any task."""
    evaluation = headline.evaluation or most_telling(run.evaluations)
    if evaluation is not None:
        return _of_evaluation(run, evaluation, most)

    store = run.store
    if any(phase.startswith(PHASES) for phase in store.figures().phases()):
        best = best_prompts(run.folder)
        ended = []
        if best is not None:
            ids = {one.id for one in store.episodes(EpisodeFilters(phase=HELD_OUT_PHASE)) if one.prompts == best}
            ended = [one for one in _latest(store, EpisodeFilters(phase=HELD_OUT_PHASE)) if one.id in ids]
        source = "the best prompts on held-out tasks"
        if not ended:
            ended = _latest(store, EpisodeFilters(phase=PHASES))
            source = "the latest episodes of the search"
    elif run.is_run and (steps := store.figures().steps("train")):
        ended = _latest(store, EpisodeFilters(phase="train", training_step=steps[-1]))
        source = f"training tasks of step {steps[-1] + 1}"
    else:
        ended = _latest(store, EpisodeFilters())
        source = f"the latest {MOST_EPISODES:,} episodes" if len(ended) == MOST_EPISODES else "the recorded episodes"

    found = _worst(ended, most, source, run.name)
    return None if found is None else _with_texts(found, store)


def _of_evaluation(run: OpenedRun, evaluation: StoredEvaluation, most: int) -> FailedTasks | None:
    """The worst tasks of the mode that a headline shows."""
    mode = next(iter((*compared_modes(evaluation), *evaluation.evaluations)), "")
    if mode not in evaluation.evaluations:
        return None
    played = evaluation.evaluations[mode]
    reports_success = bool(played.successes)
    ended = []
    for task, endings in played.by_task.items():
        for one in endings:
            if not one.known:
                continue
            ended.append(
                EndedEpisode(
                    id="",
                    task=task,
                    success=float(one.solved) if reports_success and one.solved is not None else None,
                    reward=played.floor if one.floored else one.reward,
                    error="" if one.status == "ok" else first_line(one.error),
                )
            )
    records = run.records_of(evaluation)
    source = f"{mode} on {evaluated_set(evaluation, run.held_out_tasks) or 'held-out tasks'}"
    found = _worst(ended, most, source, records.name if records else "")
    if found is None or records is None:
        return found

    # The file of an evaluation does not name its episodes. Of a task that ran several times, one that failed is shown.
    first = first_episodes(records, evaluation, mode, [failed.task for failed in found.tasks])
    tasks = []
    for failed in found.tasks:
        id = failed_episode(records, evaluation, mode, failed.task) if failed.runs > 1 else ""
        tasks.append(msgspec.structs.replace(failed, episode=id or first.get(failed.task, "")))
    return _with_texts(msgspec.structs.replace(found, tasks=tuple(tasks)), records.store)


def _latest(store: Store, filters: EpisodeFilters) -> list[EndedEpisode]:
    """The latest episodes that fit, without those that are no run of the application on a task."""
    lines = store.figures().episode_lines(filters, MOST_EPISODES)
    rewards = store.rewards([line.id for line in lines])
    ended = []
    for line in lines:
        if line.status == "cancelled" or line.phase in NO_TASKS:
            continue
        named = rewards.get(line.id)
        ended.append(
            EndedEpisode(
                id=str(line.id),
                task=str(line.task),
                success=line.solved,
                reward=sum(named.values()) if named else None,
                error="" if line.status == "ok" else first_line(line.error),
            )
        )
    return ended


def _worst(ended: Sequence[EndedEpisode], most: int, source: str, place: str) -> FailedTasks | None:
    """The worst tasks of these episodes; None if nobody knows what came of any."""
    reports_success = any(one.success is not None for one in ended)
    by_task: dict[str, list[EndedEpisode]] = {}
    for one in ended:
        if reports_success and (one.error or (one.success is None and one.reward is not None)):
            one = msgspec.structs.replace(one, success=0.0)
        if one.error or one.success is not None or one.reward is not None:
            by_task.setdefault(one.task, []).append(one)
    if not by_task:
        return None

    every = []
    for task, runs in by_task.items():
        successes = [one.success for one in runs if one.success is not None]
        rewards = [one.reward for one in runs if one.reward is not None]
        shown = min(runs, key=_badness)
        every.append(
            FailedTask(
                task=task,
                runs=len(runs),
                success=fmean(successes) if successes else None,
                reward=fmean(rewards) if rewards else None,
                error=shown.error,
                episode=shown.id,
                exchange=Exchange(),
            )
        )
    if reports_success:
        failed = [one for one in every if one.success is not None and one.success < 1]
    else:
        highest = max((one.reward for one in every if one.reward is not None), default=0.0)
        failed = [one for one in every if one.error or (one.reward is not None and one.reward < highest)]
    failed.sort(key=lambda one: (*_badness(one), one.task))
    return FailedTasks(
        tasks=tuple(failed[:most]),
        total=len(failed),
        known=len(every),
        measure="success" if reports_success else "reward",
        source=source,
        place=place,
    )


def _badness(one: EndedEpisode | FailedTask) -> tuple[float, bool, float]:
    """A key that sorts the worst first: by success, then errors, then by reward."""
    return one.success or 0.0, not one.error, -math.inf if one.reward is None else one.reward


def _with_texts(found: FailedTasks, store: Store) -> FailedTasks:
    """The same tasks with the questions and answers of their episodes, which are in the store."""
    texts = exchanges(store, [one.episode for one in found.tasks if one.episode])
    tasks = []
    for one in found.tasks:
        tasks.append(msgspec.structs.replace(one, exchange=texts.get(one.episode, Exchange())))
    return msgspec.structs.replace(found, tasks=tuple(tasks))
