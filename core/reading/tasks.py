"""Success by task over the steps of a run: which tasks never succeed, which always, and which changed; and how often an
adaptive pool draws each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from cotune.algorithms.task_signals import EVEN_SHARE, TaskFacts, chances
from cotune.errors import RunError
from cotune.reading.headline import SINGLE
from cotune.reading.run import OpenedRun
from cotune.records.policies import TRAINED
from cotune.storage.checkpoints import CHECKPOINT, newest_checkpoint, read_policies
from cotune.storage.run_layout import RunLayout, read_config
from cotune.storage.typed_json import read_if_typed

PAGE = 60
MOST_CELLS = 2000
"""Tasks of the grid."""
COLUMNS = 30
"""Columns of the map; where a run has more steps, several share one."""
KINDS: Mapping[str, Callable[[float, float], bool]] = {
    "never": lambda low, high: high <= 0,
    "always": lambda low, high: low >= 1,
    "sometimes": lambda low, high: high > 0 and low < 1,
}
"""Kinds of tasks, by the lowest and the highest outcome of one."""
ORDERS = ("hardest", "most")
"""Orders beside that of the ids: the lowest outcome first; those that an adaptive pool draws most often first."""


class Cell(msgspec.Struct, frozen=True):
    """A task in some steps: the mean of its outcome (None without episodes), its episodes, and the steps, from 1."""

    value: float | None
    episodes: int
    first: int
    last: int


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task: the mean of its outcome over all episodes, and by steps; `draws` is how often an adaptive pool draws it,
    1 for as often as the average task, None where that is not known."""

    id: str
    episodes: int
    value: float | None
    draws: float | None
    cells: tuple[Cell, ...]


class GridCell(msgspec.Struct, frozen=True):
    """A task in the grid of all: the mean of its outcome (None where nobody knows it), and its episodes."""

    id: str
    value: float | None
    episodes: int


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """The averaged `measure` is `success`, or the sum of an episode's rewards. `counts` are tasks by kind; `adaptive`:
    whether tasks of the run are drawn so. `grid` has the first `MOST_CELLS` tasks that were asked for, of `total`.
    `sparse`: whether most tasks have episodes in one step alone, so that a map of steps says nothing."""

    rows: tuple[TaskRow, ...]
    measure: str
    counts: Mapping[str, int]
    steps: tuple[tuple[int, int], ...]
    low: float
    high: float
    after: str = ""
    adaptive: bool = False
    grid: tuple[GridCell, ...] = ()
    total: int = 0
    sparse: bool = False


class _Curriculum(msgspec.Struct):
    pool: str = "even"


class _Known(msgspec.Struct):
    """What a checkpoint holds of tasks."""

    tasks: dict[str, TaskFacts] = {}


def _draws(run: OpenedRun, tasks: Iterable[str]) -> tuple[dict[str, float], bool]:
    """How often an adaptive pool would draw each task next, as a multiple of the average one, by the newest checkpoint;
    and whether the run has such a pool."""
    if not run.is_run or run.folder is None:
        return {}, False
    try:
        newest = newest_checkpoint(RunLayout(run.folder).checkpoints)
        settings = msgspec.convert(read_config(run.folder).get("curriculum") or {}, _Curriculum)
        played = [] if newest is None else read_policies(newest)
    except (RunError, msgspec.ValidationError):
        return {}, False
    known = None if newest is None else read_if_typed(newest / CHECKPOINT, _Known)
    if known is None or not known.tasks:
        return {}, settings.pool == "adaptive"
    places = {name: i for i, name in enumerate(dict.fromkeys([*tasks, *known.tasks]))}
    roles = {role for policy in played if policy.kind in TRAINED for role in policy.roles}
    found = chances(places, known.tasks, roles, EVEN_SHARE) * len(places)
    return {name: float(found[place]) for name, place in places.items()}, settings.pool == "adaptive"


def tasks(run: OpenedRun, phase: str, kind: str = "", after: str = "", order: str = "") -> TaskPage:
    """A page of tasks, those after the task `after`, in the order of their ids or of ORDERS. `kind` is one of KINDS, or
    empty for all."""
    figures, on_failure = run.figures, run.config.on_failure
    measure, every = figures.outcomes_by_task(phase, on_failure)
    bounds: dict[str, tuple[float, float]] = {}
    for row in every:
        if row.lowest is not None and row.highest is not None:
            bounds[row.task] = (row.lowest, row.highest)
    counts = {name: sum(fits(low, high) for low, high in bounds.values()) for name, fits in KINDS.items()}
    fits = KINDS.get(kind)
    chosen = [row for row in every if fits is None or (row.task in bounds and fits(*bounds[row.task]))]
    draws, adaptive = _draws(run, [str(row.task) for row in every]) if phase == "train" else ({}, False)
    if order == "hardest":
        chosen.sort(key=lambda row: (row.mean is None, row.mean))
    elif order == "most":
        chosen.sort(key=lambda row: -draws.get(str(row.task), 0.0))
    ids = [str(row.task) for row in chosen]
    if after in ids:
        rest = chosen[ids.index(after) + 1 :]
    else:  # it has left this kind since
        rest = [row for row in chosen if order in ORDERS or str(row.task) > after]
    page = rest[:PAGE]

    made = [step + 1 for step in figures.steps(phase)]
    width = max(1, -(-len(made) // COLUMNS))
    columns = tuple((made[i], made[min(i + width, len(made)) - 1]) for i in range(0, len(made), width))
    place = {step: at for at, (first, last) in enumerate(columns) for step in range(first, last + 1)}
    sums: dict[str, list[tuple[int, float]]] = {str(row.task): [(0, 0.0)] * len(columns) for row in page}
    for task, step, n, total in figures.outcomes_by_step(phase, on_failure, sums):
        count, sum_ = sums[str(task)][place[step + 1]]
        sums[str(task)][place[step + 1]] = (count + n, sum_ + (total or 0.0))
    tried = [sum(count > 0 for count, _ in cells) for cells in sums.values()]
    return TaskPage(
        rows=tuple(
            TaskRow(
                id=str(row.task),
                episodes=row.episodes,
                value=row.mean,
                draws=draws.get(str(row.task)),
                cells=tuple(
                    Cell(total / count if count else None, count, *steps)
                    for (count, total), steps in zip(sums[str(row.task)], columns, strict=True)
                ),
            )
            for row in page
        ),
        measure=measure,
        counts={"all": len(every), **counts},
        steps=columns,
        low=min([0.0, *(low for low, _ in bounds.values())]),
        high=max([1.0, *(high for _, high in bounds.values())]),
        after=page[-1].task if len(rest) > PAGE else "",
        adaptive=adaptive,
        grid=tuple(GridCell(str(row.task), row.mean, row.episodes) for row in chosen[:MOST_CELLS]),
        total=len(chosen),
        sparse=bool(tried) and sum(tried) < 2 * len(tried),
    )


def selected_path(run: OpenedRun) -> str:
    """The path of training's episodes, such as `best of 8 by scorer`; empty for single samples."""
    path = str(run.metrics[-1].get("path") or SINGLE) if run.metrics else SINGLE
    return "" if path == SINGLE else path
