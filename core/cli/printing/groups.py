"""`cotune show --groups`: groups by role and turn, and the candidates left out of training, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from cotune.algorithms.filters import REASONS
from cotune.reading.groups import MOST_EPISODES, GroupCell, by_role_and_turn, step_groups
from cotune.reading.run import OpenedRun
from cotune.tables import BAD, QUIET, grid, plural, warn


def show_groups(run: OpenedRun, limit: int) -> Iterable[RenderableType]:
    """Groups of the latest `limit` training steps; of the recorded episodes where there was no training."""
    steps = run.figures.steps("train")
    shown = [step_groups(run, step) for step in steps[-limit:]] or [step_groups(run, None)]
    latest = f"the latest {MOST_EPISODES}" if shown[0].capped else "all"
    found = plural(len(shown), "training step") if steps else f"{latest} episodes, none of them training"
    if len(shown) < len(steps):
        found = f"the latest {len(shown)} of {plural(len(steps), 'training step')}"
    yield Text.assemble(
        ("groups ", "bold"), f"of {found}\n", (f"{shown[0].recipe}; key {', '.join(shown[0].key)}\n", QUIET)
    )
    yield _table(by_role_and_turn(group for step in shown for group in step.groups))
    trained, candidates = sum(step.trained for step in shown), sum(step.candidates for step in shown)
    yield Text(f"\n{trained:,} of {plural(candidates, 'candidate')} trained on; left out:\n", style="bold")
    left_out: Counter[str] = Counter()
    for step in shown:
        left_out.update(step.left_out)
    yield _reasons(left_out, candidates)
    for problem in dict.fromkeys(problem for step in shown for problem in step.problems):
        yield Text(problem, style=BAD)


def _table(groups: Mapping[tuple[str, Any], GroupCell]) -> RenderableType:
    table = grid(
        "role", "turn>", "groups>", "candidates>", "size>", "mean reward>", "spread>", "no spread>", "trained>"
    )
    for (role, turn), cell in groups.items():
        count, low, high = len(cell.sizes), min(cell.sizes), max(cell.sizes)
        size = str(low) if low == high else f"{low}-{high}"
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


def _reasons(left_out: Counter[str], candidates: int) -> RenderableType:
    table = grid("reason", "candidates>", "share>", "why")
    for reason, count in left_out.most_common():
        if count:
            share = f"{count / max(1, candidates):.1%}"
            table.add_row(Text(reason), warn(count), share, Text(REASONS.get(reason, ""), style=QUIET))
    return table if table.row_count else Text("nothing", style=QUIET)
