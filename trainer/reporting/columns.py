"""The table of roles that a training run shows, and the explanations of `--explain`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from cotune.reading.metrics import columns
from cotune.storage.metrics_file import StepMetrics
from cotune.tables import Grid, definitions, grid

STEP = {
    "held-out": "Single samples on tasks that are not trained on, with the 95% interval and the number of tasks: the "
    "figure to trust.",
    "all candidates": "Mean reward of all candidates of each role, chosen or not: the policy as it is. Should rise.",
    "single samples, best of K": "Mean outcome of the step's episodes, failed ones too, by name. `single samples`: "
    "every episode as the policy plays it. `best of K by scorer`: of the paths that the scorer chose, which are better "
    "than the policy is: look at held-out tasks for that.",
    "groups, rows": "Groups that were compared, and the candidates in them that were trained on.",
    "gradient": "Shares of roles in the gradient of a policy that they share.",
    "left out": "Candidates that were not trained on, by reason; cotune show RUN --groups explains each.",
    "refill": "Tasks that the step has drawn beyond its own, and how many of their groups differ in their rewards.",
    "failed episodes": "Episodes that ended in an error; cotune show RUN --status error lists them.",
    "rollout, update": "Seconds by phase: sampling, learning, publishing the new weights, saving. `left` is the time "
    "to the last step.",
    "rows by staleness": "In mode async: rows by how many versions their sampler was behind.",
    "not updated": "Policies that stay as they were, and why: no sample, no reward, no comparison (alone in their "
    "groups), no signal (all advantages 0), filtered, no gradient.",
}
"""Parts of the line that a step prints, each with its explanation."""


def role_table(metrics: StepMetrics) -> Grid:
    """Return the table of a step's figures by role. An optional figure has a column if it is not 0 for some role."""
    nonzero_figures: set[str] = set()
    for figures in metrics.roles.values():
        nonzero_figures.update(name for name, value in figures.items() if value)
    shown = {name: metric for name, metric in columns().items() if not metric.optional or name in nonzero_figures}
    table = grid("role", *(f"{metric.column}>" for metric in shown.values()))
    for role, figures in metrics.roles.items():
        cells = [_figure_text(figures.get(name), metric.share) for name, metric in shown.items()]
        table.add_row(Text(role), *cells)
    return table


def explain_columns() -> Iterable[RenderableType]:
    """Yield the columns of the table of roles and the parts of a step's line, for `cotune train --explain`."""
    yield definitions("by role", {metric.column: metric.help for metric in columns().values()})
    yield ""
    yield definitions("by step", STEP)
    yield Text("\nOf a run: cotune show RUN --steps --explain. In the browser: cotune view RUN.")


def _figure_text(value: Any, percent: bool) -> str:
    """Format a figure of the table of roles. Small numbers keep significant digits, which "0.000" would hide."""
    if value is None:
        return "-"
    if percent:
        return f"{value:.0%}"
    if value and abs(value) < 1e-3:
        return f"{value:.4g}"
    return f"{value:.3f}"
