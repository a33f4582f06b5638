"""The runs of a folder, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.reading.facts import facts
from cotune.reading.run import OpenedRun
from cotune.reading.words import change_text
from cotune.tables import BAD, GOOD, NAME, cells, grid

_STATE_STYLES = {"finished": GOOD, "under way": "yellow", "recording": "yellow", "stopped": BAD, "failed": BAD}


def list_runs(runs: Sequence[OpenedRun]) -> RenderableType:
    """A table of the runs, then the path, workflow and date of each, then the verdicts. Closes the runs."""
    table = grid("run", "state", "recipe", "steps>", "episodes>", "figure, first to last")
    sources: list[Text] = []
    verdicts: list[Text] = []
    for run in runs:
        about = facts(run)
        headline = run.headline
        state = Text(run.state, style=_STATE_STYLES.get(run.state, ""))
        figure = change_text(headline.changes[0]) if headline.changes else ""
        table.add_row(Text(run.name, style=NAME), state, *cells((about.recipe, about.steps, about.episodes, figure)))
        source = " · ".join(filter(None, (str(run.path), about.workflow, about.created)))
        # Not wrapped, so that a path can be copied from the terminal.
        sources.append(Text.assemble((run.name, NAME), f": {source}", no_wrap=True, overflow="ignore"))
        if headline.verdict:
            verdicts.append(Text.assemble((run.name, NAME), f": {headline.verdict}"))
        run.close()
    if verdicts:
        verdicts.insert(0, Text(""))
    return Group(table, "", *sources, *verdicts)
