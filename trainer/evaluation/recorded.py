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
from cotune.trainer.evaluation.report import compare
from cotune.trainer.evaluation.run import share_floor, summarise
from cotune.trainer.evaluation.sink import EvaluationSink

RECORDED = "recorded"


def read_recorded(
    path: str | Path, tasks: Sequence[Task], prices: Prices, goal: Goal | None = None
) -> tuple[EvaluatedMode, str]:
    """Evaluate the first recorded episode of each task, and say in a sentence which tasks these are.

    These are the recorded ones among `tasks`, or all recorded tasks if there are none. Raises ConfigError if no episode
    was recorded.
    """
    with open_store(path, read_only=True) as store:
        episodes: dict[str, Episode] = {}
        for episode in store.episodes():
            if episode.fork is None and not episode.phase.startswith(("eval", "check", JUDGING)):
                episodes.setdefault(episode.task.id, episode)
        if not episodes:
            raise ConfigError(
                "records", without_password(path), "has no finished episode", "Record some with cotune trace."
            )
        shared = [task.id for task in tasks if task.id in episodes]
        sink = EvaluationSink(Nowhere())

        def rewards(target: str) -> list[RewardRecord]:
            stored = store.rewards([target]).get(target, {})
            return [RewardRecord(target, name, value) for name, value in stored.items()]

        started = time.perf_counter()
        for episode in [episodes[id] for id in shared] or list(episodes.values()):
            for call in store.calls(episode.id):
                chosen = () if call.chosen is None else rewards(candidate_id(call.id, call.chosen))
                sink.write([call, *chosen])
            sink.write([*rewards(episode.id), msgspec.structs.replace(episode, rollout=0)])
        evaluation = summarise(RECORDED, sink, time.perf_counter() - started, prices, goal)
        evaluation = msgspec.structs.replace(evaluation, temperature="app")
    if shared:
        return evaluation, f"{RECORDED}: {len(shared)} of {len(tasks)} tasks are in {path}."
    return evaluation, f"{RECORDED}: none of the tasks is in {path}; the figures are of its own {len(episodes)} tasks."


def with_recorded(
    report: EvaluationReport, candidates: Collection[str], recorded: EvaluatedMode, note: str
) -> EvaluationReport:
    """Return the report with the recorded episodes as its first row. The modes in `candidates` are compared with it."""
    modes = {RECORDED: recorded, **report.evaluations}
    if not any(mode.opposed for mode in modes.values()):
        modes = dict(zip(modes, share_floor(list(modes.values())), strict=True))
        recorded = modes[RECORDED]
    comparisons = list(report.comparisons)
    for label, mode in modes.items():
        has_shared_tasks = mode.endings.keys() & recorded.endings.keys()
        if label in candidates and mode.all_failed is None and has_shared_tasks:
            comparisons.append(compare(mode, recorded))
    return msgspec.structs.replace(
        report, evaluations=modes, comparisons=tuple(comparisons), notes=(*report.notes, note)
    )
