"""The tasks that a run failed, the worst first, with question, answer, expected answer and error.

A task is judged by the most informative episodes of the run: of its evaluation, of the best prompts on held-out tasks,
of its last training step, or else the latest recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import msgspec

from cotune.reading.by_task import failed_episode, first_episodes
from cotune.reading.evaluations import EvaluatedMode, StoredEvaluation, TaskEnding, most_telling
from cotune.reading.exchange import Exchange, exchanges
from cotune.reading.headline import Headline, compared_modes
from cotune.reading.prompt_search import HELD_OUT_PHASE, PHASES, best_prompts
from cotune.reading.recorded_answers import OutcomeValues
from cotune.reading.run import OpenedRun
from cotune.reading.task_sets import evaluated_set
from cotune.records.structs import JUDGING, REFLECTING
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.outcomes import failure_reward
from cotune.storage.protocol import Store
from cotune.tables import first_line

MOST_EPISODES = 2000
"""Maximum number of episodes that are read, the latest ones, so that a store of millions is as quick."""

NO_TASKS = ("check", JUDGING, REFLECTING)
"""Phases of episodes that do not run the application on a task."""


class EndedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an episode. `success` and `reward` are None if unknown; `id` is empty if it was not recorded."""

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
    """The worst of `total` failed tasks among `known` tasks with a result. If no episode reports `success`, `measure`
    is `reward`, and a task counts as failed with an error or with less than the highest reward. `source` describes the
    episodes, and `place` is the name of the run that holds them."""

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
    """The `most` worst tasks of a run with this headline; None if its episodes have no results of tasks."""
    evaluation = headline.evaluation or most_telling(run.evaluations)
    if evaluation is not None:
        return _failed_in_evaluation(run, evaluation, most)

    store = run.store
    if any(phase.startswith(PHASES) for phase in store.figures().phases()):
        ended = _episodes_with_best_prompts(run)
        source = "the best prompts on held-out tasks"
        if not ended:
            ended = _latest_episodes(run, EpisodeFilters(phase=PHASES))
            source = "the latest episodes of the search"
    elif run.is_run and (steps := store.figures().steps("train")):
        ended = _latest_episodes(run, EpisodeFilters(phase="train", training_step=steps[-1]))
        source = f"training tasks of step {steps[-1] + 1}"
    else:
        ended = _latest_episodes(run, EpisodeFilters())
        source = f"the latest {MOST_EPISODES:,} episodes" if len(ended) == MOST_EPISODES else "the recorded episodes"

    worst = _worst_tasks(ended, most, source, run.name)
    return None if worst is None else _with_texts(worst, store)


def _episodes_with_best_prompts(run: OpenedRun) -> list[EndedEpisode]:
    """The latest episodes on held-out tasks with the best prompts of a search; empty if these prompts are unknown."""
    best = best_prompts(run.folder)
    if best is None:
        return []
    held_out = EpisodeFilters(phase=HELD_OUT_PHASE)
    ids = {episode.id for episode in run.store.episodes(held_out) if episode.prompts == best}
    return [episode for episode in _latest_episodes(run, held_out) if episode.id in ids]


def _failed_in_evaluation(run: OpenedRun, evaluation: StoredEvaluation, most: int) -> FailedTasks | None:
    """The worst tasks of an evaluation, in the mode that a headline shows, else in the first mode."""
    # A headline compares two modes, and shows the first of them.
    modes = [*compared_modes(evaluation), *evaluation.evaluations]
    mode = modes[0] if modes else ""
    evaluated = evaluation.evaluations.get(mode)
    if evaluated is None:
        return None
    ended: list[EndedEpisode] = []
    for task, endings in evaluated.by_task.items():
        ended += [_ended_episode(task, ending, evaluated) for ending in endings if ending.known]
    records = run.records_of(evaluation)
    source = f"{mode} on {evaluated_set(evaluation, run.held_out_tasks) or 'held-out tasks'}"
    worst = _worst_tasks(ended, most, source, records.name if records else "")
    if worst is None or records is None:
        return worst

    # The file of an evaluation does not name its episodes, so they are looked up in the records. For a task that ran
    # several times, show an episode that failed.
    first_of_task = first_episodes(records, evaluation, mode, [failed.task for failed in worst.tasks])
    tasks: list[FailedTask] = []
    for failed in worst.tasks:
        episode = first_of_task.get(failed.task, "")
        if failed.runs > 1:
            episode = failed_episode(records, evaluation, mode, failed.task) or episode
        tasks.append(msgspec.structs.replace(failed, episode=episode))
    return _with_texts(msgspec.structs.replace(worst, tasks=tuple(tasks)), records.store)


def _ended_episode(task: str, ending: TaskEnding, evaluated: EvaluatedMode) -> EndedEpisode:
    """The result of an episode of an evaluation, from the file of the evaluation, which does not have its id."""
    workflow_reports_success = bool(evaluated.successes)
    success = None
    if workflow_reports_success and ending.solved is not None:
        success = float(ending.solved)
    reward = ending.reward
    if ending.floored:  # it failed without an outcome, so it counts with the lowest reward of the evaluation
        reward = evaluated.floor
    error = "" if ending.status == "ok" else first_line(ending.error)
    return EndedEpisode(id="", task=task, success=success, reward=reward, error=error)


def _latest_episodes(run: OpenedRun, filters: EpisodeFilters) -> list[EndedEpisode]:
    """The latest episodes of a run that match the filters and run the application on a task. A failed episode without
    rewards has the reward that the setting `on_failure` gives it."""
    store = run.store
    lines = store.figures().episode_lines(filters, MOST_EPISODES)
    rewards = store.rewards([line.id for line in lines])
    values = OutcomeValues(failure_reward(run.config.on_failure))
    values.add(lines, rewards)
    value_of_episode = values.by_episode()
    ended: list[EndedEpisode] = []
    for line in lines:
        if line.status == "cancelled" or line.phase in NO_TASKS:
            continue
        components = rewards.get(line.id)
        reward = sum(components.values()) if components else value_of_episode.get(line.id)
        ended.append(
            EndedEpisode(
                id=str(line.id),
                task=str(line.task),
                success=line.solved,
                reward=reward,
                error="" if line.status == "ok" else first_line(line.error),
            )
        )
    return ended


def _worst_tasks(ended: Sequence[EndedEpisode], most: int, source: str, place: str) -> FailedTasks | None:
    """The tasks that were solved least, at most `most` of them, each with its worst episode; None if no result is
    known.

    If an episode reports `success`, a task is failed unless all its episodes succeed. Otherwise it is failed if it had
    an error, or less than the highest reward of any task. `source` and `place` say where the episodes come from.
    """
    reports_success = any(episode.success is not None for episode in ended)
    by_task: dict[str, list[EndedEpisode]] = {}
    for episode in ended:
        if not episode.error and episode.success is None and episode.reward is None:
            continue  # its result is unknown
        result = episode
        # Among episodes that report success, an error or a mere reward counts as unsolved.
        if reports_success and (episode.error or episode.success is None):
            result = msgspec.structs.replace(episode, success=0.0)
        by_task.setdefault(episode.task, []).append(result)
    if not by_task:
        return None

    all_tasks = [_task_result(task, results) for task, results in by_task.items()]
    if reports_success:
        failed = [task for task in all_tasks if task.success is not None and task.success < 1]
    else:
        highest = max((task.reward for task in all_tasks if task.reward is not None), default=0.0)
        failed = [task for task in all_tasks if task.error or (task.reward is not None and task.reward < highest)]
    failed.sort(key=lambda task: (*_badness(task), task.task))
    return FailedTasks(
        tasks=tuple(failed[:most]),
        total=len(failed),
        known=len(all_tasks),
        measure="success" if reports_success else "reward",
        source=source,
        place=place,
    )


def _task_result(task: str, episodes: Sequence[EndedEpisode]) -> FailedTask:
    """The mean success and reward of a task over its episodes, with the error of the worst episode."""
    successes = [episode.success for episode in episodes if episode.success is not None]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    worst_episode = min(episodes, key=_badness)
    return FailedTask(
        task=task,
        runs=len(episodes),
        success=fmean(successes) if successes else None,
        reward=fmean(rewards) if rewards else None,
        error=worst_episode.error,
        episode=worst_episode.id,
        exchange=Exchange(),  # the texts follow only for the tasks that are shown
    )


def _badness(result: EndedEpisode | FailedTask) -> tuple[float, float, bool]:
    """A sort key that puts the worst first: by success, then by reward, then errors."""
    success = result.success or 0.0
    reward = -math.inf if result.reward is None else result.reward
    return success, reward, not result.error


def _with_texts(failed: FailedTasks, store: Store) -> FailedTasks:
    """The same tasks with the questions and answers of their episodes from the store."""
    texts = exchanges(store, [task.episode for task in failed.tasks if task.episode])
    tasks = []
    for task in failed.tasks:
        tasks.append(msgspec.structs.replace(task, exchange=texts.get(task.episode, Exchange())))
    return msgspec.structs.replace(failed, tasks=tuple(tasks))
