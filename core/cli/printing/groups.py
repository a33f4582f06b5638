"""`cotune show --groups`: groups by role and turn, and the samples left out of training with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np
from rich.console import RenderableType
from rich.text import Text

from cotune.algorithms.filters import REASONS
from cotune.algorithms.recipes import Recipe
from cotune.algorithms.run_recipe import GroupCell, config_of, recipe_of, regroup, trained_roles
from cotune.storage.protocol import Store
from cotune.tables import BAD, QUIET, grid, plural, warn


class GroupCounts(msgspec.Struct):
    """Groups of several training steps, by role and turn (None where the recipe's key has neither)."""

    cells: dict[tuple[str | None, int | None], GroupCell] = {}
    left_out: Counter[str] = msgspec.field(default_factory=Counter)
    candidates: int = 0
    kept: int = 0
    problems: list[str] = []


def show_groups(store: Store, limit: int) -> Iterable[RenderableType]:
    """Groups of the latest `limit` training steps; of all recorded episodes where there was no training."""
    phase = "train" if store.rows("SELECT 1 FROM episodes WHERE phase = 'train' LIMIT 1") else None
    found = store.rows(
        "SELECT DISTINCT training_step FROM episodes WHERE phase = 'train' ORDER BY 1 DESC LIMIT ?", (limit,)
    )
    steps = [step for (step,) in reversed(found)] or [None]
    (total,) = store.rows("SELECT count(DISTINCT training_step) FROM episodes WHERE phase = 'train'")[0]
    chosen, why = recipe_of(store)
    counts = GroupCounts()
    consumed = store.consumed()
    for step in steps:
        _count(counts, store, chosen, phase, step, consumed.keys())
    what = "all episodes, none of them training" if phase is None else plural(len(steps), "training step")
    if phase and len(steps) < total:
        what = f"the latest {len(steps)} of {plural(total, 'training step')}"
    yield Text.assemble(("groups ", "bold"), f"of {what}\n", (f"{why}; key {', '.join(chosen.key)}\n", QUIET))
    yield _table(counts)
    yield Text(f"\n{counts.kept:,} of {plural(counts.candidates, 'candidate')} trained on; left out:\n", style="bold")
    yield _reasons(counts)
    for problem in dict.fromkeys(counts.problems):
        yield Text(problem, style=BAD)


def _count(
    counts: GroupCounts,
    store: Store,
    chosen: Recipe,
    phase: str | None,
    step: int | None,
    consumed: Iterable[str],
) -> None:
    roles = trained_roles(store, step) if phase else None
    found = regroup(store, store.episodes(phase=phase, training_step=step), chosen, config_of(store), roles)
    counts.left_out.update(found.left_out)
    counts.candidates += found.candidates
    counts.kept += len(found.prepared.trained) if found.prepared else 0
    counts.problems.extend(found.problems)
    for group, values in found.groups:
        fields = dict(zip(chosen.key, group.key, strict=True))
        cell = counts.cells.setdefault((fields.get("role"), fields.get("turn")), GroupCell())  # type: ignore[arg-type]
        cell.add(values, group.id in consumed)


def _table(counts: GroupCounts) -> RenderableType:
    table = grid(
        "role", "turn>", "groups>", "candidates>", "size>", "mean reward>", "spread>", "no spread>", "trained>"
    )
    for (role, turn), cell in sorted(counts.cells.items(), key=lambda item: (item[0][0] or "", item[0][1] or 0)):
        count, low, high = len(cell.sizes), min(cell.sizes), max(cell.sizes)
        size = str(low) if low == high else f"{low}-{high}"
        table.add_row(
            Text(role or "all"),
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


def _reasons(counts: GroupCounts) -> RenderableType:
    table = grid("reason", "candidates>", "share>", "why")
    for reason, count in counts.left_out.most_common():
        if count:
            share = f"{count / max(1, counts.candidates):.1%}"
            table.add_row(Text(reason), warn(count), share, Text(REASONS.get(reason, ""), style=QUIET))
    return table if table.row_count else Text("nothing", style=QUIET)
