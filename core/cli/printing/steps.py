"""`cotune show --steps`: the curves of a run, and a line for each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.errors import RunError
from cotune.reading.curves import charts
from cotune.reading.headline import SINGLE
from cotune.reading.run import OpenedRun
from cotune.tables import NAME, cells, definitions, figure, grid, plural, sparkline, warn

_COLUMNS = {
    "step": "Number of the step, from 1.",
    "failed": "Episodes that ended in an error.",
    "held-out success, reward": "Single samples on held-out tasks, after steps with an evaluation.",
    "reward of ROLE": "Mean reward of the role's candidates, chosen or not.",
    "loss, held-out loss": "Losses of roles that learn from records.",
    "success, team, ...": "Mean outcome of the step's episodes, by name, if these are single samples; failed ones "
    "count. The outcome of paths chosen among candidates (best of 8) is a curve only.",
    "trained": "Candidates that the update learned from.",
    "left out": "Candidates that the update did not learn from. cotune show RUN --groups gives the reasons.",
    "seconds": "Time of the whole step.",
}
"""Columns of the table of steps, explained."""
_SHARES = ("held-out success", "success in training")
"""Titles of columns that are in percent."""
_ROLES = 3
"""Maximum number of roles with a column in the table of steps."""


def show_steps(path: Path | str, limit: int, explain: bool = False) -> Group:
    """The curves of a run, and a line for each of its latest `limit` steps; with `explain`, their meaning.

    Raises RunError for records alone.
    """
    with OpenedRun(path) as run:
        if not run.metrics:
            raise RunError(f"{path} has no metrics yet.", "cotune train writes them, a line for each step.")
        curves = grid("curve", "of", "first>", "last>", "steps")
        all_charts = charts([run])
        for chart in all_charts:
            for series_number, line in enumerate(chart.series):
                values = [value for value in line.values if value is not None]
                title = Text(chart.title if series_number == 0 else "", style="bold")
                first = figure(values[0], chart.percent)
                last = figure(values[-1], chart.percent)
                curves.add_row(title, *cells((line.label, first, last)), Text(sparkline(line.values), style=NAME))
        parts: list[RenderableType] = [curves, "", *_steps_table(run, limit)]
        if explain:
            parts += ["", definitions("curve", {chart.title: chart.help for chart in all_charts})]
            parts += ["", definitions("column", _COLUMNS)]
        return Group(*parts)


def _steps_table(run: OpenedRun, limit: int) -> Iterable[RenderableType]:
    """A table of the latest `limit` training steps, with the figures that at least one of them has."""
    lines = run.metrics[-limit:]
    which = f"the latest {len(lines)} of " if len(lines) < len(run.metrics) else ""
    yield Text(f"{which}{plural(len(run.metrics), 'step')}\n", style="bold")
    columns = _filled_columns(lines)
    any_failed = any(line.get("failed", 0) for line in lines)
    any_left_out = any(sum(line["left_out"].values()) for line in lines)

    titles = [*columns, "trained"]
    if any_failed:
        titles.insert(0, "failed")
    if any_left_out:
        titles.append("left out")
    table = grid("step>", *(f"{title}>" for title in titles), "seconds>")
    for row_number, line in enumerate(lines):
        row: list[Any] = [line["step"] + 1]
        if any_failed:
            row.append(warn(line.get("failed", 0)))
        for title, values in columns.items():
            value = values[row_number]
            row.append("" if value is None else figure(value, title in _SHARES))
        row.append(line.get("rows", 0))
        if any_left_out:
            row.append(sum(line["left_out"].values()))
        table.add_row(*cells((*row, f"{sum(line.get('seconds', {}).values()):.1f}")))
    yield table


def _filled_columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The columns of the table of steps, by title: a figure for each step, None for a step without it.

    Columns without any figure are left out. Outcomes of paths that were chosen among candidates have no column, only
    curves.
    """
    columns: dict[str, list[float | None]] = {}
    for name in ("success", "reward"):
        columns[f"held-out {name}"] = [(line.get("held_out") or {}).get(name) for line in lines]

    all_roles: set[str] = set()
    for line in lines:
        all_roles.update(line["roles"])
    for key, title in (("reward", "reward"), ("held_out_loss", "held-out loss"), ("loss", "loss")):
        for role in sorted(all_roles)[:_ROLES]:
            columns[f"{title} of {role}"] = [line["roles"].get(role, {}).get(key) for line in lines]

    single_outcomes: list[Mapping[str, float]] = []
    names: set[str] = set()
    for line in lines:
        is_single = line.get("path", SINGLE) == SINGLE
        single_outcomes.append(line["outcome"] if is_single else {})
        names.update(single_outcomes[-1])
    for name in sorted(names, key=lambda name: (name != "success", name))[:2]:  # success first
        columns[f"{name} in training"] = [outcome.get(name) for outcome in single_outcomes]
    return {title: values for title, values in columns.items() if any(value is not None for value in values)}
