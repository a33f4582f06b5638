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
    "loss, held-out loss": "Of roles that learn from records.",
    "success, team, ...": "Mean outcome of the step's episodes, by name, where these are single samples; failed ones "
    "count. The outcome of paths chosen among candidates (best of 8) is a curve only.",
    "trained": "Candidates that the update learned from.",
    "left out": "Candidates that it did not, for the reasons that cotune show RUN --groups gives.",
    "seconds": "The whole step.",
}
"""Columns of the table of steps, explained."""
_SHARES = ("held-out success", "success in training")
"""Titles of columns that are in percent."""
_ROLES = 3
"""Roles that have a column of their own in the table of steps."""


def show_steps(path: Path | str, limit: int, explain: bool = False) -> Group:
    """The curves of a run, and a line for each of its latest `limit` steps; with `explain`, their meaning.

    Raises RunError for records alone.
    """
    with OpenedRun(path) as run:
        if not run.metrics:
            raise RunError(f"{path} has no metrics yet.", "They come with cotune train, one line a step.")
        curves = grid("curve", "of", "first>", "last>", "steps")
        found = charts([run])
        for chart in found:
            for place, line in enumerate(chart.series):
                known = [value for value in line.values if value is not None]
                title = Text(chart.title if place == 0 else "", style="bold")
                numbers = (figure(value, chart.percent) for value in (known[0], known[-1]))
                curves.add_row(title, *cells((line.label, *numbers)), Text(sparkline(line.values), style=NAME))
        parts: list[RenderableType] = [curves, "", *_steps(run, limit)]
        if explain:
            parts += ["", definitions("curve", {chart.title: chart.help for chart in found})]
            parts += ["", definitions("column", _COLUMNS)]
        return Group(*parts)


def _steps(run: OpenedRun, limit: int) -> Iterable[RenderableType]:
    lines = run.metrics[-limit:]
    left = f"the latest {len(lines)} of " if len(lines) < len(run.metrics) else ""
    yield Text(f"{left}{plural(len(run.metrics), 'step')}\n", style="bold")
    columns = {title: values for title, values in _columns(lines).items() if any(v is not None for v in values)}
    failed, out = ([line.get("failed", 0) for line in lines], [sum(line["left_out"].values()) for line in lines])
    heads = [*(["failed"] if any(failed) else []), *columns, "trained", *(["left out"] if any(out) else []), "seconds"]
    table = grid("step>", *(f"{title}>" for title in heads))
    for place, line in enumerate(lines):
        row: list[Any] = [line["step"] + 1, *([warn(failed[place])] if any(failed) else [])]
        values = ((column[place], title in _SHARES) for title, column in columns.items())
        row += ["" if value is None else figure(value, percent) for value, percent in values]
        row += [line.get("rows", 0), *([out[place]] if any(out) else [])]
        table.add_row(*cells((*row, f"{sum(line.get('seconds', {}).values()):.1f}")))
    yield table


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Figures of steps by the title of their column. Those of chosen paths are curves alone."""
    found: dict[str, list[float | None]] = {}
    for name in ("success", "reward"):
        found[f"held-out {name}"] = [(line.get("held_out") or {}).get(name) for line in lines]
    roles = sorted({role for line in lines for role in line["roles"]})[:_ROLES]
    for key, title in (("reward", "reward"), ("held_out_loss", "held-out loss"), ("loss", "loss")):
        found |= {f"{title} of {role}": [line["roles"].get(role, {}).get(key) for line in lines] for role in roles}
    single = [line["outcome"] if line.get("path", SINGLE) == SINGLE else {} for line in lines]
    names = sorted({name for outcome in single for name in outcome}, key=lambda name: (name != "success", name))
    return found | {f"{name} in training": [outcome.get(name) for outcome in single] for name in names[:2]}
