"""Success by task over the steps of a run: which tasks never succeed, which always, and which changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from cotune.reading.headline import SINGLE
from cotune.reading.run import OpenedRun

PAGE = 60
COLUMNS = 30
"""Columns of the map; where a run has more steps, several share one."""
KINDS: Mapping[str, Callable[[float, float], bool]] = {
    "never": lambda low, high: high <= 0,
    "always": lambda low, high: low >= 1,
    "sometimes": lambda low, high: high > 0 and low < 1,
}
"""Kinds of tasks, by the lowest and the highest outcome of one."""


class Cell(msgspec.Struct, frozen=True):
    """A task in some steps: the mean of its outcome (None without episodes), its episodes, and the steps, from 1."""

    value: float | None
    episodes: int
    first: int
    last: int


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task: the mean of its outcome over all episodes, and by steps."""

    id: str
    episodes: int
    value: float | None
    cells: tuple[Cell, ...]


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """The averaged `measure` is `success`, or the sum of an episode's rewards. `counts` are tasks by kind."""

    rows: tuple[TaskRow, ...]
    measure: str
    counts: Mapping[str, int]
    steps: tuple[tuple[int, int], ...]
    low: float
    high: float
    after: str = ""


def tasks(run: OpenedRun, phase: str, kind: str = "", after: str = "") -> TaskPage:
    """A page of tasks in the order of their ids. `kind` is one of KINDS, or empty for all."""
    store, on_failure = run.store, run.config.on_failure
    measure, every = store.outcomes_by_task(phase, on_failure)
    known = [(low, high) for *_, low, high in every if low is not None]
    counts = {name: sum(fits(low, high) for low, high in known) for name, fits in KINDS.items()}
    fits = KINDS.get(kind)
    chosen = [row for row in every if fits is None or (row[3] is not None and fits(row[3], row[4]))]
    rest = [row for row in chosen if str(row[0]) > after]
    page = rest[:PAGE]

    made = [step + 1 for step in store.steps(phase)]
    width = max(1, -(-len(made) // COLUMNS))
    columns = tuple((made[i], made[min(i + width, len(made)) - 1]) for i in range(0, len(made), width))
    place = {step: at for at, (first, last) in enumerate(columns) for step in range(first, last + 1)}
    sums: dict[str, list[tuple[int, float]]] = {str(task): [(0, 0.0)] * len(columns) for task, *_ in page}
    for task, step, n, total in store.outcomes_by_step(phase, on_failure, sums):
        count, sum_ = sums[str(task)][place[step + 1]]
        sums[str(task)][place[step + 1]] = (count + n, sum_ + (total or 0.0))
    return TaskPage(
        rows=tuple(
            TaskRow(
                id=str(task),
                episodes=n,
                value=mean,
                cells=tuple(
                    Cell(total / count if count else None, count, *steps)
                    for (count, total), steps in zip(sums[str(task)], columns, strict=True)
                ),
            )
            for task, n, mean, *_ in page
        ),
        measure=measure,
        counts={"all": len(every), **counts},
        steps=columns,
        low=min([0.0, *(low for low, _ in known)]),
        high=max([1.0, *(high for _, high in known)]),
        after=page[-1][0] if len(rest) > PAGE else "",
    )


def selected_path(run: OpenedRun) -> str:
    """The path of training's episodes, such as `best of 8 by scorer`; empty for single samples."""
    path = str(run.metrics[-1].get("path") or SINGLE) if run.metrics else SINGLE
    return "" if path == SINGLE else path
