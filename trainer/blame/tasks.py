"""The tasks of an analysis: drawn from a file, or those of recorded episodes that failed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cotune.errors import ConfigError
from cotune.reading.blame import FORK, FRESH_FORK, RESCORED, summed_outcome
from cotune.records.structs import JUDGING, REFLECTING, Episode, Task
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.blame.arms import OWN, PHASES, arm_of
from cotune.trainer.blame.estimates import Outcomes, Span
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.runs import has_refused_call

EVALUATION_PREFIX = "eval-"
"""Beginning of the phases of evaluations. The phase `eval-today` is the application as it is."""


class TasksToAnalyse(NamedTuple):
    """The tasks of an analysis in the order in which they are run."""

    tasks: Sequence[Task]
    recorded: Sequence[str] = ()
    """The ids of the recorded episodes that failed on these tasks, if recorded episodes are analysed."""
    cut_off: int = 0
    """Recorded episodes that failed because they were cut off. They are not analysed."""


def tasks_to_analyse(tasks: str | Path | Iterable[Any] | None, options: BlameOptions) -> TasksToAnalyse:
    """Draw the tasks that the options allow. Raises ConfigError for both tasks and recorded episodes, or neither."""
    if options.records is None:
        if tasks is None:
            remedy = "Pass --tasks FILE, or the folder or database of recorded episodes: --episodes runs/traced"
            raise ConfigError("tasks", None, "is missing", remedy)
        return TasksToAnalyse(draw_tasks(as_tasks(tasks), options))
    if tasks is not None:
        fault = "cannot be used with recorded episodes: their tasks are analysed"
        raise ConfigError("tasks", str(tasks), fault, "Leave out --tasks or --episodes.")
    with open_store(options.records, read_only=True) as store:
        failed, cut_off = failed_tasks(store)
    drawn = draw_tasks([episode.task for episode in failed.values()], options)
    return TasksToAnalyse(drawn, [failed[task.id].id for task in drawn], cut_off)


def draw_tasks(tasks: Sequence[Task], options: BlameOptions) -> list[Task]:
    """The tasks of an analysis, in the order in which they are run.

    A larger limit takes further tasks, so that an analysis can be continued with it.
    """
    shuffled = sorted(tasks, key=lambda task: task.id)
    random.Random(options.seed).shuffle(shuffled)
    return shuffled[: options.limit]


def failed_tasks(store: Store) -> tuple[dict[str, Episode], int]:
    """Find the first failed run of each task by the unchanged application in the records. Returns them by task, and the
    number of failed runs that were left out because they were cut off. Raises ConfigError if no run failed."""
    # 1. The outcomes, whose span decides which of them are failures.
    episodes = [episode for episode in store.episodes() if is_unchanged_run(episode)]
    ended = [episode for episode in episodes if episode.is_outcome]
    rewards = store.rewards([episode.id for episode in ended])
    outcome_by_episode: dict[str, float | None] = {}
    outcomes = Outcomes()
    for episode in ended:
        outcome = summed_outcome(episode, rewards.get(episode.id))
        outcome_by_episode[episode.id] = outcome
        if outcome is not None:
            outcomes.add(OWN, episode.task.id, outcome)
    span = outcomes.span()

    # 2. The failures.
    failed: dict[str, Episode] = {}
    cut_off = sum(episode.status == "cancelled" for episode in episodes)
    for episode in ended:
        if not has_failed(episode, outcome_by_episode[episode.id], span):
            continue
        if is_cut_off(store, episode):
            cut_off += 1
        elif episode.task.id not in failed:
            failed[episode.task.id] = episode
    if not failed:
        fault = f"has {plural(len(ended), 'episode')} of the unchanged application with a known end, and none failed"
        if cut_off:
            fault += f" but for {cut_off} that were cut off"
        raise ConfigError("episodes", store.address, fault, "Name other records, or pass: --tasks FILE")
    return failed, cut_off


def is_unchanged_run(episode: Episode) -> bool:
    """Whether an episode is a run of the application as it is, from the first call to the last.

    An episode is not if it repeats another one, has edited prompts or a swapped role, or evaluates another model than
    the application's own. Episodes that only check the application or judge other episodes are not, either.
    """
    if episode.fork is not None or episode.prompts:
        return False
    if episode.phase.startswith(PHASES):
        return arm_of(episode.phase) == OWN
    if episode.phase.startswith(EVALUATION_PREFIX):
        return episode.phase == f"{EVALUATION_PREFIX}today"
    # A fork that differs from its episode before it reaches the forked call has no `fork`.
    return episode.phase not in (FORK, FRESH_FORK, RESCORED, "replay", "check", JUDGING, REFLECTING)


def has_failed(episode: Episode, outcome: float | None, span: Span) -> bool:
    """Whether an episode failed: it raised, or its metric `success` says so. Without this metric, it failed if its
    `outcome` lies in the lower half of the span. An episode whose outcome is not known (None) has not failed."""
    if not episode.is_outcome:
        return False
    if episode.status == "error":
        return True
    if outcome is None:
        return False
    return span.share(outcome) <= 0.5 if episode.solved is None else not episode.solved


def is_cut_off(store: Store, episode: Episode) -> bool:
    """Whether an episode did not run to its own end: it was interrupted, or a call was refused because of a limit."""
    return episode.status == "cancelled" or has_refused_call(store.calls(episode.id, lean=True))
