"""The page of a run's evaluations: modes side by side, compared task by task, the tasks that got worse first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.viewer import Viewer, start
from cotune.reading.by_task import KINDS, EvaluatedTask, by_task, episodes_of_modes, tasks_of_kind
from cotune.reading.causes import causes, shortened
from cotune.reading.evaluations import StoredEvaluation, most_telling
from cotune.reading.headline import compared_modes
from cotune.reading.run import OpenedRun
from cotune.tables import plural

PAGE = 100
"""Tasks of a page."""
MOST_CAUSES = 3
"""Causes of failed episodes that are shown of a mode; the others are counted."""


class ShownEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation with the two modes whose tasks are paired, and one page of the tasks of a `kind`, of which there
    are `total`. `counts` are the tasks of each kind, and under `all` of every kind. `episodes` has the id of the first
    episode of a task in a mode, which `place` shows."""

    evaluation: StoredEvaluation
    label: str
    against: str
    kind: str
    tasks: tuple[EvaluatedTask, ...]
    total: int
    counts: Mapping[str, int]
    failures: Mapping[str, tuple[str, ...]]
    place: str
    episodes: Mapping[tuple[str, str], str]


def evaluations_page(viewer: Viewer, request: Request) -> Response:
    """An evaluation of the run: its modes side by side, and task by task."""
    run, asked, first = viewer.run(request), request.query_params, start(request)
    evaluation = chosen(run.evaluations, asked.get("name", ""))
    pair = (asked.get("mode", ""), asked.get("against", ""))
    kind = asked.get("kind", "")
    kind = kind if kind in KINDS else ""
    return viewer.page(
        request,
        "evaluations.html",
        run,
        evaluations=run.evaluations,
        shown=show_evaluation(run, evaluation, pair, kind, first) if evaluation else None,
        start=first,
        size=PAGE,
    )


def chosen(evaluations: Sequence[StoredEvaluation], name: str) -> StoredEvaluation | None:
    """The evaluation of this name; else the newest one that has something to compare, else the newest."""
    return next((one for one in reversed(evaluations) if one.name == name), None) or most_telling(evaluations)


def show_evaluation(
    run: OpenedRun,
    evaluation: StoredEvaluation,
    pair: tuple[str, str] | None = None,
    kind: str = "",
    first: int = 0,
    size: int = PAGE,
) -> ShownEvaluation:
    """An evaluation as it is shown: `pair` are two of its modes; else those that a headline compares. `kind` is one of
    `by_task.KINDS`, or empty for all tasks."""
    modes = evaluation.evaluations
    pairs = [(one.label, one.against) for one in evaluation.comparisons]
    usual = compared_modes(evaluation)
    if pair not in pairs:
        pair = usual if usual in pairs else pairs[0] if pairs else (next(iter(modes), ""), "")
    every = by_task(evaluation, *pair)
    counts = {name: len(tasks_of_kind(every, name)) for name in KINDS}
    rows = tasks_of_kind(every, kind)
    shown = tuple(rows[first : first + size])
    return ShownEvaluation(
        evaluation=evaluation,
        label=pair[0],
        against=pair[1],
        kind=kind,
        tasks=shown,
        total=len(rows),
        counts={"all": len(every), **counts},
        failures={name: tuple(_failures(name, mode.failed)) for name, mode in modes.items() if mode.failed},
        place=records.name if (records := run.records_of(evaluation)) else "",
        episodes=episodes_of_modes(run, evaluation, [row.task for row in shown]),
    )


def _failures(mode: str, failed: Mapping[str, int]) -> Iterator[str]:
    """Why episodes of a mode failed, a line for each of the commonest causes."""
    ranked = sorted(failed.items(), key=lambda item: -item[1])
    shown, others = shortened(causes((mode, reason, count) for reason, count in ranked), MOST_CAUSES)
    yield from (f"{plural(cause.count, 'episode')} {cause.text}" for cause in shown)
    if others:
        yield others
