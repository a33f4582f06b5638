"""Success by task over the steps of a run: tasks that never succeed, always succeed, or changed; and how often an
adaptive pool draws each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cotune.algorithms.task_signals import EVEN_SHARE, TaskFacts, task_chances
from cotune.errors import RunError
from cotune.reading.headline import SINGLE
from cotune.reading.run import OpenedRun
from cotune.records.policies import TRAINED
from cotune.storage.checkpoints import CHECKPOINT, newest_checkpoint, read_policies
from cotune.storage.run_layout import RunLayout, read_config
from cotune.storage.sql.figures import TaskOutcome
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
    """The field of the configuration's [curriculum] about the pool."""

    pool: str = "even"


class _CheckpointTasks(msgspec.Struct):
    """The field of a checkpoint about tasks."""

    tasks: dict[str, TaskFacts] = {}


class _Draws(NamedTuple):
    """How often the run's pool of tasks would draw each task in the next step, relative to the average task (1)."""

    of_task: Mapping[str, float]
    """Empty if unknown."""
    adaptive: bool
    """Whether the run draws its tasks from an adaptive pool."""


def _read_draws(run: OpenedRun, tasks: Iterable[str]) -> _Draws:
    """How often the run's pool of tasks would draw each of these tasks. It decides by the rewards that each task had,
    which are in the newest checkpoint."""
    if not run.is_run or run.folder is None:
        return _Draws({}, adaptive=False)
    try:
        checkpoint = newest_checkpoint(RunLayout(run.folder).checkpoints)
        curriculum = msgspec.convert(read_config(run.folder).get("curriculum") or {}, _Curriculum)
        policies = [] if checkpoint is None else read_policies(checkpoint)
    except (RunError, msgspec.ValidationError):  # a damaged checkpoint: the page is shown without draws
        return _Draws({}, adaptive=False)
    is_adaptive = curriculum.pool == "adaptive"
    stored = None if checkpoint is None else read_if_typed(checkpoint / CHECKPOINT, _CheckpointTasks)
    if stored is None or not stored.tasks:
        return _Draws({}, is_adaptive)

    index_of_task: dict[str, int] = {}
    for task in [*tasks, *stored.tasks]:
        index_of_task.setdefault(task, len(index_of_task))
    trained_roles: set[str] = set()
    for policy in policies:
        if policy.kind in TRAINED:
            trained_roles.update(policy.roles)
    chances = task_chances(index_of_task, stored.tasks, trained_roles, EVEN_SHARE).tolist()
    n_tasks = len(index_of_task)  # the average task has the chance 1 / n_tasks
    relative_draws = {task: chances[i] * n_tasks for task, i in index_of_task.items()}
    return _Draws(relative_draws, is_adaptive)


def tasks(run: OpenedRun, phase: str, kind: str = "", after: str = "", order: str = "") -> TaskPage:
    """A page of the tasks that a phase of the run ran.

    `kind` is one of KINDS, or empty for tasks of all kinds. `order` is one of ORDERS, or empty for the order of their
    ids. `after` is the id of the last task of the page before, or empty for the first page.
    """
    # 1. All tasks of the phase, and the number of each kind. `bounds` are the lowest and highest outcome of a task.
    measure, all_tasks = run.figures.outcomes_by_task(phase, run.config.on_failure)
    bounds: dict[str, tuple[float, float]] = {}
    for task in all_tasks:
        if task.lowest is not None and task.highest is not None:
            bounds[task.task] = (task.lowest, task.highest)
    counts = {"all": len(all_tasks)}
    for name, is_of_kind in KINDS.items():
        counts[name] = sum(is_of_kind(low, high) for low, high in bounds.values())
    draws = _Draws({}, adaptive=False)
    if phase == "train":
        draws = _read_draws(run, [str(task.task) for task in all_tasks])

    # 2. The tasks of the kind in their order, and the page that begins after the task `after`.
    chosen = list(all_tasks)
    if kind in KINDS:
        chosen = [task for task in all_tasks if task.task in bounds and KINDS[kind](*bounds[task.task])]
    if order == "hardest":
        chosen.sort(key=lambda task: (task.mean is None, task.mean))
    elif order == "most":
        chosen.sort(key=lambda task: -draws.of_task.get(str(task.task), 0.0))
    remaining = _tasks_after(chosen, after, order)
    page = remaining[:PAGE]

    # 3. The rows of the page, each with a cell for each column of steps.
    columns = _columns_of_steps(run.figures.steps(phase))
    cells_of_task = _cells(run, phase, [str(task.task) for task in page], columns)
    rows: list[TaskRow] = []
    cells_with_episodes = 0
    for task in page:
        id = str(task.task)
        cells = cells_of_task[id]
        cells_with_episodes += sum(cell.episodes > 0 for cell in cells)
        rows.append(TaskRow(id=id, episodes=task.episodes, value=task.mean, draws=draws.of_task.get(id), cells=cells))
    # On average, a task has episodes in fewer than two columns: the map would show no change.
    is_sparse = cells_with_episodes < 2 * len(rows)
    return TaskPage(
        rows=tuple(rows),
        measure=measure,
        counts=counts,
        steps=tuple(columns),
        low=min([0.0, *(low for low, _ in bounds.values())]),
        high=max([1.0, *(high for _, high in bounds.values())]),
        after=page[-1].task if len(remaining) > PAGE else "",
        adaptive=draws.adaptive,
        grid=tuple(GridCell(str(task.task), task.mean, task.episodes) for task in chosen[:MOST_CELLS]),
        total=len(chosen),
        sparse=is_sparse,
    )


def _tasks_after(chosen: Sequence[TaskOutcome], after: str, order: str) -> Sequence[TaskOutcome]:
    """The tasks that follow the task `after` in the list of chosen tasks."""
    ids = [str(task.task) for task in chosen]
    if after in ids:
        return chosen[ids.index(after) + 1 :]
    # The task `after` has changed its kind since its page was shown, or this is the first page.
    if order in ORDERS:
        return chosen
    return [task for task in chosen if str(task.task) > after]


def _columns_of_steps(steps: Sequence[int]) -> list[tuple[int, int]]:
    """The columns of the map, at most `COLUMNS`: the first and the last step of each, from 1. `steps` count from 0."""
    width = max(1, math.ceil(len(steps) / COLUMNS))
    columns: list[tuple[int, int]] = []
    for start in range(0, len(steps), width):
        of_column = steps[start : start + width]
        columns.append((of_column[0] + 1, of_column[-1] + 1))
    return columns


def _cells(
    run: OpenedRun, phase: str, tasks: Sequence[str], columns: Sequence[tuple[int, int]]
) -> dict[str, tuple[Cell, ...]]:
    """The cells of these tasks in the map, by task: the mean outcome and the number of episodes in each column."""
    column_of_step: dict[int, int] = {}
    for column, (first, last) in enumerate(columns):
        column_of_step.update(dict.fromkeys(range(first, last + 1), column))
    episodes = {task: [0] * len(columns) for task in tasks}
    sums = {task: [0.0] * len(columns) for task in tasks}
    for outcomes in run.figures.outcomes_by_step(phase, run.config.on_failure, tasks):
        task = str(outcomes.task)
        column = column_of_step[outcomes.step + 1]
        episodes[task][column] += outcomes.episodes
        sums[task][column] += outcomes.total or 0.0

    cells: dict[str, tuple[Cell, ...]] = {}
    for task in tasks:
        cells_of_task: list[Cell] = []
        for column, (first, last) in enumerate(columns):
            n = episodes[task][column]
            mean = sums[task][column] / n if n else None
            cells_of_task.append(Cell(value=mean, episodes=n, first=first, last=last))
        cells[task] = tuple(cells_of_task)
    return cells


def selected_path(run: OpenedRun) -> str:
    """The path of training's episodes, for example `best of 8 by scorer`; empty for single samples."""
    path = str(run.metrics[-1].get("path") or SINGLE) if run.metrics else SINGLE
    return "" if path == SINGLE else path
