"""What an export's card tells of the run: how it went, what it reaches on held-out tasks, and what it took."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cotune.reading.curves import FIRST, Chart, charts, first_charts
from cotune.reading.evaluations import StoredEvaluation, read_evaluation
from cotune.reading.facts import facts
from cotune.reading.headline import Headline
from cotune.reading.run import OpenedRun
from cotune.reading.use import Totals, Use

_SHOWN = 2
"""Charts beside the card."""


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its card tells it. `uses` are by role, over all its calls."""

    recipe: str
    steps: str
    seconds: float
    judge_cost: float
    charts: list[Chart]
    uses: dict[str, Use]
    evaluated: StoredEvaluation | None
    headline: Headline


def read_background(run: Path, evaluation: Path | None = None) -> Background:
    """Read it from a run folder. The evaluation is that of the folder `evaluation`, else the newest one of the run;
    one of those that cannot be read is left out with a warning. Raises ConfigError for a folder that was named and has
    none, RunError."""
    named = read_evaluation(evaluation) if evaluation else None
    with OpenedRun(run) as opened:
        about, found = facts(opened), first_charts(charts([opened]), most=len(FIRST))
        told = opened.headline_with([named]) if named else opened.headline
        chosen = [next((c for c in found if c.section == section), None) for section in ("Outcome", "Roles")]
        return Background(
            recipe=about.recipe,
            steps=about.steps,
            seconds=about.seconds,
            judge_cost=about.judge_cost,
            charts=[chart for chart in chosen if chart is not None][:_SHOWN],
            uses=dict(sorted(Totals(opened).by_role().items())),
            evaluated=named or told.evaluation,
            headline=told,
        )
