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
    """The first recorded episode of each task of a records file, and a sentence that says which tasks those are.

    Of `tasks`, where any of them was recorded; else of all that were. Raises ConfigError where nothing was.
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
            known = store.rewards([target]).get(target, {})
            return [RewardRecord(target, name, value) for name, value in known.items()]

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


def beside(
    report: EvaluationReport, candidates: Collection[str], recorded: EvaluatedMode, note: str
) -> EvaluationReport:
    """The report with the recorded episodes as its first row. The evaluations of `candidates` are compared with it."""
    rows = {RECORDED: recorded, **report.evaluations}
    if not any(e.opposed for e in rows.values()):
        rows = dict(zip(rows, share_floor(list(rows.values())), strict=True))
        recorded = rows[RECORDED]
    sound = [e for label, e in rows.items() if label in candidates and e.all_failed is None]
    shared = [e for e in sound if e.endings.keys() & recorded.endings.keys()]
    return msgspec.structs.replace(
        report,
        evaluations=rows,
        comparisons=(*report.comparisons, *(compare(e, recorded) for e in shared)),
        notes=(*report.notes, note),
    )
