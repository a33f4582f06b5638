"""What an export's card tells of the run: how it went, what it reaches on held-out tasks, and what it took."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cotune.integrations.web.viewer.curves import FIRST, Chart, charts, first_charts
from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.integrations.web.viewer.overview import Totals, Use, facts, prices_of
from cotune.reading.evaluations import StoredEvaluation, read_evaluation
from cotune.reading.headline import Headline, headline

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
    opened = OpenedRun(run, run.name)
    try:
        about, found = facts(opened), first_charts(charts([opened]), most=len(FIRST))
        told = (
            headline(opened.metrics, [named], opened.store, recipe=opened.config.get("recipe"))
            if named
            else opened.headline
        )
        chosen = [next((c for c in found if c.section == section), None) for section in ("Outcome", "Roles")]
        return Background(
            recipe=about.recipe,
            steps=about.steps,
            seconds=about.seconds,
            judge_cost=about.judge_cost,
            charts=[chart for chart in chosen if chart is not None][:_SHOWN],
            uses=Totals(opened).by_role(prices_of(opened, {})),
            evaluated=named or told.evaluation,
            headline=told,
        )
    finally:
        opened.close()
