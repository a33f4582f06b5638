"""`cotune show --groups`: groups by role and turn, and the candidates left out of training, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from cotune.algorithms.filters import REASONS
from cotune.reading.groups import MOST_EPISODES, GroupCell, by_role_and_turn, step_groups
from cotune.reading.run import OpenedRun
from cotune.tables import BAD, QUIET, grid, plural, warn


def show_groups(run: OpenedRun, limit: int) -> Iterable[RenderableType]:
    """Show how candidates were grouped in the latest `limit` training steps, and why candidates were left out. Records
    without training steps are grouped as the recipe would group them.
    """
    steps = run.figures.steps("train")
    shown = [step_groups(run, step) for step in steps[-limit:]]
    if not steps:
        shown = [step_groups(run, None)]
        latest = f"the latest {MOST_EPISODES}" if shown[0].capped else "all"
        source = f"{latest} episodes, none of them training"
    elif len(shown) < len(steps):
        source = f"the latest {len(shown)} of {plural(len(steps), 'training step')}"
    else:
        source = plural(len(shown), "training step")
    yield Text.assemble(
        ("groups ", "bold"), f"of {source}\n", (f"{shown[0].recipe}; key {', '.join(shown[0].key)}\n", QUIET)
    )
    yield _groups_table(by_role_and_turn(chain.from_iterable(step.groups for step in shown)))
    trained = sum(step.trained for step in shown)
    candidates = sum(step.candidates for step in shown)
    yield Text(f"\n{trained:,} of {plural(candidates, 'candidate')} trained on; left out:\n", style="bold")
    left_out: Counter[str] = Counter()
    for step in shown:
        left_out.update(step.left_out)
    yield _reasons_text(left_out, candidates)
    for problem in dict.fromkeys(chain.from_iterable(step.problems for step in shown)):
        yield Text(problem, style=BAD)


def _groups_table(groups: Mapping[tuple[str, Any], GroupCell]) -> RenderableType:
    """A table with a row for each role and turn: the number and sizes of its groups, their rewards, the share of groups
    whose rewards do not differ, and the number of groups trained on.
    """
    table = grid(
        "role", "turn>", "groups>", "candidates>", "size>", "mean reward>", "spread>", "no spread>", "trained>"
    )
    for (role, turn), cell in groups.items():
        count = len(cell.sizes)
        smallest = min(cell.sizes)
        largest = max(cell.sizes)
        size = str(smallest) if smallest == largest else f"{smallest}-{largest}"
        table.add_row(
            Text(role),
            "all" if turn is None else str(turn),
            f"{count:,}",
            f"{sum(cell.sizes):,}",
            size,
            f"{np.mean(cell.means):.3f}",
            f"{np.mean(cell.spreads):.3f}",
            f"{cell.flat / count:.0%}",
            f"{cell.trained:,}",
        )
    return table if table.row_count else Text("no groups", style=QUIET)


def _reasons_text(left_out: Counter[str], candidates: int) -> RenderableType:
    """A table of the reasons for which candidates were left out, with their share of all candidates."""
    table = grid("reason", "candidates>", "share>", "why")
    for reason, count in left_out.most_common():
        if count:
            share = f"{count / max(1, candidates):.1%}"
            table.add_row(Text(reason), warn(count), share, Text(REASONS.get(reason, ""), style=QUIET))
    return table if table.row_count else Text("nothing", style=QUIET)
