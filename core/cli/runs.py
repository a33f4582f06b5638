"""What `cotune runs` and `cotune show --steps` print: the runs of a folder, and the curves of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.errors import RunError
from cotune.reading.words import change_text
from cotune.tables import BAD, GOOD, NAME, QUIET, cells, definitions, figure, grid, plural, sparkline, warn

if TYPE_CHECKING:
    from cotune.integrations.viewer.opened import OpenedRun

_STATES = {"finished": GOOD, "under way": "yellow", "recording": "yellow", "stopped": BAD}
_COLUMNS = {
    "step": "Number of the step, from 1.",
    "failed": "Episodes that ended in an error.",
    "success, team, ...": "Mean outcome of the step's episodes, by name; failed ones count.",
    "reward of ROLE": "Mean reward of the role's candidates, chosen or not.",
    "trained": "Candidates that the update learned from.",
    "left out": "Candidates that it did not, for the reasons that cotune show RUN --groups gives.",
    "seconds": "The whole step.",
}
"""Columns of the table of steps, and what each tells."""
_ROLES = 3
"""Roles that have a column of their own in the table of steps."""


def list_runs(folders: Sequence[Path | str]) -> RenderableType:
    """A line for each run and records file in these folders. Raises RunError where there is none."""
    from cotune.integrations.viewer.opened import open_runs
    from cotune.integrations.viewer.overview import facts

    table = grid("run", "state", "recipe", "steps>", "episodes>", "figure, first to last")
    for run in open_runs(folders):
        about, changes = facts(run), run.headline.changes
        state = Text(run.state, style=_STATES.get(run.state, ""))
        figure = change_text(changes[0]) if changes else ""
        row = cells((about.recipe, about.steps, f"{about.episodes:,}", figure))
        table.add_row(Text(run.name, style=NAME), state, *row)
        run.close()
    return table


def show_steps(path: Path | str, limit: int, explain: bool = False) -> Group:
    """The curves of a run, and a line for each of its latest `limit` steps; with `explain`, what each of them tells.

    Raises RunError for records alone.
    """
    from cotune.integrations.viewer.curves import charts
    from cotune.integrations.viewer.opened import OpenedRun

    run = OpenedRun(Path(path), Path(path).name)
    try:
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
    finally:
        run.close()


def _steps(run: OpenedRun, limit: int) -> Iterable[RenderableType]:
    lines = run.metrics[-limit:]
    left = f"the latest {len(lines)} of " if len(lines) < len(run.metrics) else ""
    yield Text(f"{left}{plural(len(run.metrics), 'step')}\n", style="bold")
    outcomes = sorted({name for line in lines for name in line["outcome"]}, key=lambda name: name != "success")[:2]
    roles = sorted({role for line in lines for role in line["roles"]})[:_ROLES]
    names = [f"{name}>" for name in outcomes]
    rewards = [f"reward of {role}>" for role in roles]
    table = grid("step>", "failed>", *names, *rewards, "trained>", "left out>", "seconds>")
    for line in lines:
        outcome = [_cell(line["outcome"].get(name), name == "success") for name in outcomes]
        reward = [_cell(line["roles"].get(role, {}).get("reward")) for role in roles]
        ends = (line.get("rows", 0), sum(line["left_out"].values()), f"{sum(line.get('seconds', {}).values()):.1f}")
        table.add_row(*cells((line["step"] + 1, warn(line.get("failed", 0)), *outcome, *reward, *ends)))
    yield table
    if run.metrics[-1].get("path", "single samples") != "single samples":
        yield Text(f"success and rewards of episodes: {run.metrics[-1]['path']}", style=QUIET)


def _cell(value: float | None, percent: bool = False) -> str:
    return "" if value is None else figure(value, percent)
