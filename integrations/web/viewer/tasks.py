"""Success by task over the steps of a run: which tasks never succeed, which always, and which changed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.reading.headline import SINGLE
from cotune.storage.episode_filters import COUNTED
from cotune.storage.outcomes import LOWEST_SUM, REPORTED, SOLVED, outcome_sum

PAGE = 60
COLUMNS = 30
"""Columns of the map; where a run has more steps, several share one."""


class Cell(msgspec.Struct, frozen=True):
    """A task in some steps: the mean of its outcome (None without episodes), its episodes, and the steps, from 1."""

    value: float | None
    episodes: int
    first: int | None
    last: int | None


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task: the mean of its outcome over all episodes, and by steps."""

    id: str
    episodes: int
    value: float | None
    cells: tuple[Cell, ...]


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """`measure` is what is averaged: `success`, or the sum of an episode's rewards. `counts` are tasks by kind."""

    rows: tuple[TaskRow, ...]
    measure: str
    counts: Mapping[str, int]
    steps: tuple[tuple[int, int], ...]
    low: float
    high: float
    after: str = ""


def tasks(run: OpenedRun, phase: str, kind: str = "", after: str = "") -> TaskPage:
    """A page of tasks in the order of their ids. `kind` is `never`, `always`, `sometimes` or empty for all."""
    asked = run.rows(f"SELECT 1 FROM episodes WHERE phase = ? AND {REPORTED} IS NOT NULL LIMIT 1", (phase,))
    measure = "success" if asked else "reward"
    lowest = run.rows(LOWEST_SUM, (phase,))[0][0] if run.store else 0.0
    reward = outcome_sum(run.config.get("on_failure", "lowest"), lowest)
    value = SOLVED if asked else reward
    sql = f"""WITH of_task AS MATERIALIZED (
                  SELECT task, count(*) AS n, avg(v) AS mean, min(v) AS low, max(v) AS high
                  FROM (SELECT task, {value} AS v FROM episodes WHERE phase = ? AND {COUNTED})
                  GROUP BY task)
              """
    counts = run.rows(
        sql + "SELECT count(*), sum(high <= 0), sum(low >= 1), min(low), max(high) FROM of_task", (phase,)
    )
    total, never, always, low, high = counts[0] if counts else (0, 0, 0, 0, 1)
    never, always = never or 0, always or 0
    conditions = {"never": "high <= 0", "always": "low >= 1", "sometimes": "high > 0 AND low < 1"}
    where = f"AND {conditions[kind]}" if kind in conditions else ""
    found = run.rows(
        sql + f"SELECT task, n, mean FROM of_task WHERE task > ? {where} ORDER BY task LIMIT ?",
        (phase, after, PAGE + 1),
    )
    steps = _columns(run, phase)
    cells = _cells(run, phase, value, [task for task, *_ in found[:PAGE]], steps)
    empty = tuple(Cell(None, 0, first, last) for first, last in steps)
    rows = tuple(
        TaskRow(id=str(task), episodes=n, value=mean, cells=cells.get(task, empty)) for task, n, mean in found[:PAGE]
    )
    return TaskPage(
        rows=rows,
        measure=measure,
        counts={"all": total, "never": never, "always": always, "sometimes": total - never - always},
        steps=steps,
        low=min(0.0, low or 0.0),
        high=max(1.0, high or 1.0),
        after=found[PAGE - 1][0] if len(found) > PAGE else "",
    )


def selected_path(run: OpenedRun) -> str:
    """What episodes of training went on with, such as `best of 8 by scorer`; empty for single samples."""
    path = str(run.metrics[-1].get("path") or SINGLE) if run.metrics else SINGLE
    return "" if path == SINGLE else path


def _columns(run: OpenedRun, phase: str) -> tuple[tuple[int, int], ...]:
    """First and last step of each column."""
    sql = f"""SELECT DISTINCT training_step + 1 FROM episodes WHERE phase = ? AND {COUNTED}
              AND training_step IS NOT NULL ORDER BY 1"""
    steps = [step for (step,) in run.rows(sql, (phase,))]
    width = max(1, -(-len(steps) // COLUMNS))
    return tuple((steps[i], steps[min(i + width, len(steps)) - 1]) for i in range(0, len(steps), width))


def _cells(
    run: OpenedRun, phase: str, value: str, names: list[str], steps: tuple[tuple[int, int], ...]
) -> dict[str, tuple[Cell, ...]]:
    if not names or not steps:
        return {}
    place = {step: at for at, (first, last) in enumerate(steps) for step in range(first, last + 1)}
    sql = f"""SELECT task, training_step + 1, count(v), sum(v) FROM (
                  SELECT task, training_step, {value} AS v FROM episodes
                  WHERE phase = ? AND {COUNTED} AND task IN ({",".join("?" * len(names))})
                  AND training_step IS NOT NULL) GROUP BY task, training_step"""
    sums: dict[str, list[list[float]]] = {name: [[0, 0.0] for _ in steps] for name in names}
    for task, step, n, total in run.rows(sql, (phase, *names)):
        cell = sums[task][place[step]]
        cell[0], cell[1] = cell[0] + n, cell[1] + (total or 0.0)
    return {
        name: tuple(Cell(total / n if n else None, int(n), *steps[at]) for at, (n, total) in enumerate(of_task))
        for name, of_task in sums.items()
    }
