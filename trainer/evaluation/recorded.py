"""Recorded episodes as an evaluation: results and cost of the application with its own provider."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from cotune.algorithms.goal import Goal
from cotune.errors import ConfigError
from cotune.reading.evaluations import EvaluatedMode, EvaluationReport
from cotune.recording.recorder import Nowhere
from cotune.records.ids import candidate_id
from cotune.records.prices import Prices
from cotune.records.structs import JUDGING, Episode, RewardRecord, Task
from cotune.storage.open_store import open_store, without_password
from cotune.storage.protocol import Store
from cotune.trainer.evaluation.report import compare
from cotune.trainer.evaluation.run import share_floor, summarise
from cotune.trainer.evaluation.sink import EvaluationSink

RECORDED = "recorded"


def read_recorded(
    path: str | Path, tasks: Sequence[Task], prices: Prices, goal: Goal | None = None
) -> tuple[EvaluatedMode, str]:
    """Evaluate the first recorded episode of each task.

    The tasks are the recorded ones among `tasks`, or all recorded tasks if none of `tasks` was recorded. Returns the
    figures, and a sentence that names these tasks. Raises ConfigError if no episode was recorded.
    """
    with open_store(path, read_only=True) as store:
        episode_by_task: dict[str, Episode] = {}
        for episode in store.episodes():
            if episode.fork is None and not episode.phase.startswith(("eval", "check", JUDGING)):
                episode_by_task.setdefault(episode.task.id, episode)
        if not episode_by_task:
            raise ConfigError(
                "records", without_password(path), "has no finished episode", "Record some with cotune trace."
            )
        episodes = [episode_by_task[task.id] for task in tasks if task.id in episode_by_task]
        note = f"{RECORDED}: {len(episodes)} of {len(tasks)} tasks are in {path}."
        if not episodes:
            episodes = list(episode_by_task.values())
            note = f"{RECORDED}: none of the tasks is in {path}; the figures are of its own {len(episodes)} tasks."

        sink = EvaluationSink(Nowhere())
        started = time.perf_counter()
        for episode in episodes:
            for call in store.calls(episode.id):
                sink.write([call])
                if call.chosen is not None:
                    sink.write(_stored_rewards(store, candidate_id(call.id, call.chosen)))
            sink.write(_stored_rewards(store, episode.id))
            # Only one episode of each task counts, whatever its number was.
            sink.write([msgspec.structs.replace(episode, rollout=0)])
        evaluation = summarise(RECORDED, sink, time.perf_counter() - started, prices, goal)
    return msgspec.structs.replace(evaluation, temperature="app"), note


def _stored_rewards(store: Store, target: str) -> list[RewardRecord]:
    """The rewards of a candidate or an episode, by its id, as records."""
    rewards = store.rewards([target]).get(target, {})
    return [RewardRecord(target, name, value) for name, value in rewards.items()]


def with_recorded(
    report: EvaluationReport, candidates: Collection[str], recorded: EvaluatedMode, note: str
) -> EvaluationReport:
    """Return the report with the recorded episodes as its first row. The modes in `candidates` are compared with them.

    A failed episode counts with the lowest reward of any mode, the recorded episodes included (`share_floor`).
    """
    modes = [recorded, *report.evaluations.values()]
    # If roles play against each other, the report also has modes that each count one role's reward, which share no
    # lowest reward with the others.
    if not any(mode.opposed for mode in modes):
        modes = share_floor(modes)
    recorded_mode = modes[0]
    evaluations = dict(zip((RECORDED, *report.evaluations), modes, strict=True))
    comparisons = list(report.comparisons)
    for label, mode in evaluations.items():
        has_shared_tasks = mode.endings.keys() & recorded_mode.endings.keys()
        if label in candidates and mode.all_failed is None and has_shared_tasks:
            comparisons.append(compare(mode, recorded_mode))
    return msgspec.structs.replace(
        report, evaluations=evaluations, comparisons=tuple(comparisons), notes=(*report.notes, note)
    )
