"""Success by task over the steps of a run: tasks that never succeed, always succeed, or changed; and how often an
adaptive pool draws each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from cotune.algorithms.task_signals import EVEN_SHARE, TaskFacts, task_chances
from cotune.errors import RunError
from cotune.reading.headline import SINGLE
from cotune.reading.run import OpenedRun
from cotune.records.policies import TRAINED
from cotune.storage.checkpoints import CHECKPOINT, newest_checkpoint, read_policies
from cotune.storage.run_layout import RunLayout, read_config
from cotune.storage.typed_json import read_if_typed

PAGE = 60
MOST_CELLS = 2000
"""Maximum number of tasks in the grid."""
COLUMNS = 30
"""Maximum number of columns of the map. In a run with more steps, several share a column."""
KINDS: Mapping[str, Callable[[float, float], bool]] = {
    "never": lambda low, high: high <= 0,
    "always": lambda low, high: low >= 1,
    "sometimes": lambda low, high: high > 0 and low < 1,
}
"""Kinds of tasks, by the lowest and the highest outcome of the task's episodes."""
ORDERS = ("hardest", "most")
"""Orders other than by id: the lowest outcome first; the tasks that an adaptive pool draws most often first."""


class Cell(msgspec.Struct, frozen=True):
    """A task in some steps: the mean of its outcome (None without episodes), its episodes, and the steps, from 1."""

    value: float | None
    episodes: int
    first: int
    last: int


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task: the mean of its outcome over all episodes, and by steps. `draws` is how often an adaptive pool draws it,
    relative to the average task (1); None if unknown."""

    id: str
    episodes: int
    value: float | None
    draws: float | None
    cells: tuple[Cell, ...]


class GridCell(msgspec.Struct, frozen=True):
    """A task in the grid of all tasks: the mean of its outcome (None if unknown), and its number of episodes."""

    id: str
    value: float | None
    episodes: int


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of tasks. `measure` is the averaged figure: `success`, or the sum of an episode's rewards. `counts` are
    the numbers of tasks by kind. `adaptive` is whether the run draws its tasks from an adaptive pool. `grid` has the
    first `MOST_CELLS` of the `total` chosen tasks. `sparse` is whether most tasks have episodes in only one step: then
    a map of steps shows nothing."""

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


class _CheckpointTasks(msgspec.Struct):
    """The field of a checkpoint about tasks."""

    tasks: dict[str, TaskFacts] = {}


def _draws(run: OpenedRun, tasks: Iterable[str]) -> tuple[dict[str, float], bool]:
    """How often an adaptive pool would draw each task in the next step, relative to the average task, and whether the
    run has an adaptive pool.

    The newest checkpoint has the rewards by task from which the pool computes it. Without one, no task has a value.
    """
    if not run.is_run or run.folder is None:
        return {}, False
    try:
        newest = newest_checkpoint(RunLayout(run.folder).checkpoints)
        settings = msgspec.convert(read_config(run.folder).get("curriculum") or {}, _Curriculum)
        policies = [] if newest is None else read_policies(newest)
    except (RunError, msgspec.ValidationError):
        return {}, False
    adaptive = settings.pool == "adaptive"
    checkpoint = None if newest is None else read_if_typed(newest / CHECKPOINT, _CheckpointTasks)
    if checkpoint is None or not checkpoint.tasks:
        return {}, adaptive
    task_indices = {name: i for i, name in enumerate(dict.fromkeys([*tasks, *checkpoint.tasks]))}
    trained_roles: set[str] = set()
    for policy in policies:
        if policy.kind in TRAINED:
            trained_roles.update(policy.roles)
    relative = task_chances(task_indices, checkpoint.tasks, trained_roles, EVEN_SHARE) * len(task_indices)
    return {name: float(relative[index]) for name, index in task_indices.items()}, adaptive


def tasks(run: OpenedRun, phase: str, kind: str = "", after: str = "", order: str = "") -> TaskPage:
    """A page of tasks: the tasks after `after`, in the order of their ids or in an order of ORDERS. `kind` is one of
    KINDS, or empty for all."""
    figures = run.figures
    on_failure = run.config.on_failure
    measure, every = figures.outcomes_by_task(phase, on_failure)
    bounds: dict[str, tuple[float, float]] = {}
    for row in every:
        if row.lowest is not None and row.highest is not None:
            bounds[row.task] = (row.lowest, row.highest)
    counts = {"all": len(every)}
    for name, is_of_kind in KINDS.items():
        counts[name] = sum(is_of_kind(low, high) for low, high in bounds.values())
    if kind in KINDS:
        chosen = [row for row in every if row.task in bounds and KINDS[kind](*bounds[row.task])]
    else:
        chosen = list(every)
    draws, adaptive = _draws(run, [str(row.task) for row in every]) if phase == "train" else ({}, False)
    if order == "hardest":
        chosen.sort(key=lambda row: (row.mean is None, row.mean))
    elif order == "most":
        chosen.sort(key=lambda row: -draws.get(str(row.task), 0.0))
    ids = [str(row.task) for row in chosen]
    if after in ids:
        remaining = chosen[ids.index(after) + 1 :]
    else:  # the task `after` has changed its kind meanwhile
        remaining = [row for row in chosen if order in ORDERS or str(row.task) > after]
    page = remaining[:PAGE]

    # The columns of the map: each covers the steps from its first to its last one.
    steps = [step + 1 for step in figures.steps(phase)]
    width = max(1, math.ceil(len(steps) / COLUMNS))
    columns: list[tuple[int, int]] = []
    column_of: dict[int, int] = {}
    for start in range(0, len(steps), width):
        first = steps[start]
        last = steps[start : start + width][-1]
        column_of.update(dict.fromkeys(range(first, last + 1), len(columns)))
        columns.append((first, last))

    # Numbers of episodes and sums of outcomes, by task and column.
    counts_of: dict[str, list[int]] = {str(row.task): [0] * len(columns) for row in page}
    sums_of: dict[str, list[float]] = {str(row.task): [0.0] * len(columns) for row in page}
    for task, step, n, total in figures.outcomes_by_step(phase, on_failure, counts_of):
        column = column_of[step + 1]
        counts_of[str(task)][column] += n
        sums_of[str(task)][column] += total or 0.0
    rows = []
    for row in page:
        id = str(row.task)
        cells = []
        for column, (first, last) in enumerate(columns):
            n = counts_of[id][column]
            cells.append(Cell(sums_of[id][column] / n if n else None, n, first, last))
        draws_of_task = draws.get(id)
        rows.append(TaskRow(id=id, episodes=row.episodes, value=row.mean, draws=draws_of_task, cells=tuple(cells)))
    columns_with_episodes = sum(cell.episodes > 0 for row in rows for cell in row.cells)
    return TaskPage(
        rows=tuple(rows),
        measure=measure,
        counts=counts,
        steps=tuple(columns),
        low=min([0.0, *(low for low, _ in bounds.values())]),
        high=max([1.0, *(high for _, high in bounds.values())]),
        after=page[-1].task if len(remaining) > PAGE else "",
        adaptive=adaptive,
        grid=tuple(GridCell(str(row.task), row.mean, row.episodes) for row in chosen[:MOST_CELLS]),
        total=len(chosen),
        sparse=columns_with_episodes < 2 * len(rows),
    )


def selected_path(run: OpenedRun) -> str:
    """The path of training's episodes, for example `best of 8 by scorer`; empty for single samples."""
    path = str(run.metrics[-1].get("path") or SINGLE) if run.metrics else SINGLE
    return "" if path == SINGLE else path
