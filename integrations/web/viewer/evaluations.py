"""The page of a run's evaluations. It shows modes side by side and task by task, the tasks that got worse first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.viewer import Viewer, start
from cotune.reading.by_task import KINDS, EvaluatedTask, by_task, episodes_of_modes, tasks_of_kind
from cotune.reading.causes import causes, shorten_causes
from cotune.reading.evaluations import StoredEvaluation, most_telling
from cotune.reading.headline import compared_modes
from cotune.reading.run import OpenedRun
from cotune.tables import plural

PAGE = 100
"""Tasks of a page."""
MOST_CAUSES = 3
"""Causes of failed episodes that are shown for a mode; the others are counted."""


class ShownEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation with one page of its tasks, on which two modes are compared."""

    evaluation: StoredEvaluation
    label: str
    """The mode that is compared with the mode `against`."""
    against: str
    kind: str
    tasks: tuple[EvaluatedTask, ...]
    """The tasks of this page, of this `kind`."""
    total: int
    """Number of all tasks of this kind."""
    counts: Mapping[str, int]
    """Kind -> number of its tasks; `all` for every kind."""
    failures: Mapping[str, tuple[str, ...]]
    """Mode -> the causes of its failed episodes."""
    place: str
    """Name of the records that have the episodes; empty if they were not kept."""
    episodes: Mapping[tuple[str, str], str]
    """(task, mode) -> id of the first episode."""


def evaluations_page(viewer: Viewer, request: Request) -> Response:
    """An evaluation of the run: its modes side by side, and task by task."""
    run = viewer.run(request)
    asked = request.query_params
    first = start(request)
    evaluation = chosen(run.evaluations, asked.get("name", ""))
    pair = (asked.get("mode", ""), asked.get("against", ""))
    kind = asked.get("kind", "")
    if kind not in KINDS:
        kind = ""
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
    """The evaluation of this name; otherwise the newest one that compares modes, otherwise the newest."""
    for evaluation in reversed(evaluations):
        if evaluation.name == name:
            return evaluation
    return most_telling(evaluations)


def show_evaluation(
    run: OpenedRun,
    evaluation: StoredEvaluation,
    pair: tuple[str, str] | None = None,
    kind: str = "",
    first: int = 0,
    size: int = PAGE,
) -> ShownEvaluation:
    """Prepare an evaluation for a page, which compares two of its modes (such as "trained" and "base") task by task.

    `pair` are the two modes; the default is the comparison of the headline. `kind` is one of `by_task.KINDS`, or empty
    for all tasks. The page shows `size` tasks from the position `first`.
    """
    mode, against = _pair_to_show(evaluation, pair)
    all_tasks = by_task(evaluation, mode, against)
    counts = {"all": len(all_tasks)}
    for name in KINDS:
        counts[name] = len(tasks_of_kind(all_tasks, name))
    selected_tasks = tasks_of_kind(all_tasks, kind)
    shown_tasks = tuple(selected_tasks[first : first + size])
    failures = {}
    for name, results in evaluation.evaluations.items():
        if results.failed:
            failures[name] = tuple(_failures(name, results.failed))
    records = run.records_of(evaluation)  # None if its episodes were not kept
    return ShownEvaluation(
        evaluation=evaluation,
        label=mode,
        against=against,
        kind=kind,
        tasks=shown_tasks,
        total=len(selected_tasks),
        counts=counts,
        failures=failures,
        place=records.name if records else "",
        episodes=episodes_of_modes(run, evaluation, [row.task for row in shown_tasks]),
    )


def _pair_to_show(evaluation: StoredEvaluation, asked: tuple[str, str] | None) -> tuple[str, str]:
    """The two modes to compare on a page: the pair that the user has asked for, if the evaluation has compared it, else
    the pair of the headline, else the first pair.

    Without any comparison, it is the first mode and an empty text.
    """
    compared_pairs = [(comparison.label, comparison.against) for comparison in evaluation.comparisons]
    for pair in (asked, compared_modes(evaluation)):
        if pair is not None and pair in compared_pairs:
            return pair
    if compared_pairs:
        return compared_pairs[0]
    return next(iter(evaluation.evaluations), ""), ""


def _failures(mode: str, failed: Mapping[str, int]) -> Iterator[str]:
    """The causes of a mode's failed episodes, a line for each of the most frequent ones."""
    ranked = sorted(failed.items(), key=lambda item: -item[1])
    shown, others = shorten_causes(causes((mode, reason, count) for reason, count in ranked), MOST_CAUSES)
    yield from (f"{plural(cause.count, 'episode')} {cause.text}" for cause in shown)
    if others:
        yield others
