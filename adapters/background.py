"""What an export's card tells of the run: how it went, what it reaches on held-out tasks, and what it took."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.viewer.curves import Chart, charts
from cotune.integrations.viewer.opened import OpenedRun
from cotune.integrations.viewer.overview import Totals, Use, facts, prices_of
from cotune.intervals import Interval

log = logging.getLogger("cotune")

EVALUATION = "evaluation.json"
"""File that `cotune eval --out` writes."""
_SHOWN = 2
"""Charts beside the card."""


class EvaluationUse(msgspec.Struct, frozen=True):
    """What the episodes of a mode took; `cost` where prices were known."""

    prompt_tokens: int
    completion_tokens: int
    cost: float | None = None
    unpriced: int = 0


class Mode(msgspec.Struct, frozen=True):
    """An evaluation of one lineup: base, trained, swapped ..."""

    episodes: int
    success: Interval | None
    reward: Interval | None
    use: EvaluationUse


class Compared(msgspec.Struct, frozen=True):
    """Two modes on the same tasks, in a sentence."""

    verdict: str


class Evaluated(msgspec.Struct, frozen=True):
    """What is read again of evaluation.json."""

    evaluations: dict[str, Mode]
    comparisons: tuple[Compared, ...] = ()


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its card tells it. `uses` are by role, over all its calls."""

    recipe: str
    steps: str
    seconds: float
    judge_cost: float
    charts: list[Chart]
    uses: dict[str, Use]
    evaluated: Evaluated | None


def read_background(run: Path, evaluation: Path | None = None) -> Background:
    """Read it from a run folder. The evaluation is that of the folder `evaluation`, else the newest one that lies in a
    folder of the run; one of those that cannot be read is left out with a warning. Raises ConfigError for a folder that
    was named and has none, RunError."""
    evaluated = read_evaluation(evaluation) if evaluation else _newest_evaluation(run)
    opened = OpenedRun(run, run.name)
    try:
        about, found = facts(opened), charts([opened])
        chosen = [next((c for c in found if c.section == section), None) for section in ("Outcome", "Roles")]
        return Background(
            recipe=about.recipe,
            steps=about.steps,
            seconds=about.seconds,
            judge_cost=about.judge_cost,
            charts=[chart for chart in chosen if chart is not None][:_SHOWN],
            uses=Totals(opened).by_role(prices_of(opened, {})),
            evaluated=evaluated,
        )
    finally:
        opened.close()


def read_evaluation(folder: Path) -> Evaluated:
    """The evaluation in a folder. Raises ConfigError where none can be read."""
    try:
        return msgspec.json.decode((folder / EVALUATION).read_bytes(), type=Evaluated)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        allowed = f"a folder that `cotune eval --out` wrote ({error})"
        raise ConfigError("evaluation", str(folder), allowed, "Evaluate the run with --out FOLDER.") from None


def _newest_evaluation(run: Path) -> Evaluated | None:
    found = sorted(run.glob(f"*/{EVALUATION}"), key=lambda file: file.stat().st_mtime)
    if not found:
        return None
    try:
        return read_evaluation(found[-1].parent)
    except ConfigError as error:
        log.warning("The card has no evaluation: the newest one of the run cannot be read. %s", error)
        return None
