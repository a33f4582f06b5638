"""`cotune runs`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cotune.cli.command import Parser
from cotune.reading.facts import facts
from cotune.reading.find_runs import open_runs
from cotune.reading.run import OpenedRun
from cotune.reading.words import change_text
from cotune.tables import BAD, GOOD, NAME, cells, grid
from cotune.terminal import terminal

EXAMPLE = "cotune runs runs/"
_STATES = {"finished": GOOD, "under way": "yellow", "recording": "yellow", "stopped": BAD, "failed": BAD}


def arguments(command: Parser) -> None:
    command.add_argument("folders", nargs="*", metavar="FOLDER", help="folder of runs, or a run (default: runs)")


def run(a: argparse.Namespace) -> int:
    found = open_runs(a.folders or ["runs"])
    a.result = str(found[-1].path)
    terminal().print(list_runs(found), crop=False)
    return 0


def list_runs(runs: Sequence[OpenedRun]) -> RenderableType:
    """A line for each run and records file, which it closes; below them where each is, its workflow and its date."""
    table = grid("run", "state", "recipe", "steps>", "episodes>", "figure, first to last")
    places, verdicts = [], []
    for run in runs:
        about, found = facts(run), run.headline
        state = Text(run.state, style=_STATES.get(run.state, ""))
        figure = change_text(found.changes[0]) if found.changes else ""
        row = cells((about.recipe, about.steps, about.episodes, figure))
        table.add_row(Text(run.name, style=NAME), state, *row)
        told = " · ".join(filter(None, (str(run.path), about.workflow, about.created)))
        places.append(Text.assemble((run.name, NAME), f": {told}", no_wrap=True, overflow="ignore"))  # to be copied
        if found.verdict:
            verdicts.append(Text.assemble((run.name, NAME), f": {found.verdict}"))
        run.close()
    return Group(table, "", *places, *([""] if verdicts else []), *verdicts)
