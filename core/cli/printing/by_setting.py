"""Runs by one of their settings, as a table over seeds."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.intervals import Interval
from cotune.reading.by_setting import BySetting
from cotune.reading.words import interval_text
from cotune.tables import NAME, cells, figure, grid


def show_by_setting(grouped: BySetting) -> RenderableType:
    """The text to print about runs by a setting: a table with a row for each value, then the figure of each run, then
    notes."""
    # Above the table and not its title, which would be broken at the width of the table.
    title = Text(f"{grouped.figure}: means and 95% intervals over runs (Student's t)", style="bold")
    has_gain = any(group.gain for group in grouped.groups)
    has_difference = any(group.against_first for group in grouped.groups)
    optional: list[str] = []
    if has_gain:
        optional.append("since start>")
    if has_difference:
        optional.append(f"less {grouped.groups[0].value}, by seed>")
    table = grid(grouped.setting, "runs>", "at the end>", *optional)
    for group in grouped.groups:
        row = [len(group.runs), interval_text(group.last, grouped.percent)]
        if has_gain:
            row.append(_difference(group.gain, grouped.percent))
        if has_difference:
            row.append(_difference(group.against_first, grouped.percent))
        table.add_row(Text(group.value, style=NAME), *cells(row))
    lines = []
    for group in grouped.groups:
        runs = [f"{run.name} {figure(run.last, grouped.percent)} (seed {run.seed})" for run in group.runs]
        lines.append(Text.assemble((group.value, NAME), f": {', '.join(runs)}"))
    return Group(title, table, "", *lines, *(Text(note) for note in grouped.notes))


def _difference(interval: Interval | None, percent: bool) -> str:
    """A difference with its sign; empty for None."""
    if interval is None:
        return ""
    text = interval_text(interval, percent)
    return text if interval.mean < 0 else f"+{text}"
