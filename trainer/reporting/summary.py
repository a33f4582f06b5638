"""The summary of a run, from the lines of its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cotune.reading.headline import Headline
from cotune.reading.run import OpenedRun
from cotune.reading.words import stayed_reasons
from cotune.trainer.run.checkpoint import Checkpoint

NO_SIGNAL = (
    "no signal, as all rewards that were compared are equal. Where nothing succeeds yet, learn from demonstrations "
    "first (cotune train WORKFLOW --recipe sft --records TRACED, then --init with that run), take tasks that are "
    "solved now and then, or a larger plan.k; else a scorer or judge that tells answers apart."
)
"""The remedy for a policy that no step can update."""

SILENT_STEPS = 3
"""Number of steps without a call after which a role is mentioned."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. `finished` is False if it was stopped; `--resume` continues from `steps`."""

    path: str
    steps: int
    finished: bool
    versions: Mapping[str, int]
    headline: Headline
    """The main figures, the most important first: held-out success of base and trained with the verdict, then rewards
    by role."""
    calls: int
    candidates: int
    groups: int
    left_out: Mapping[str, int]
    lost_records: int
    seconds: float
    stayed: Mapping[str, Mapping[str, int]] = {}
    """Trained policies that no step has updated, each with its reasons (`StepMetrics.stayed`) and their numbers of
    steps, the commonest first."""
    silent: Mapping[str, int] = {}
    """Trained roles without a call in the last steps, each with the number of these steps: `SILENT_STEPS` or more, or
    all steps."""
    held_out: str = ""
    """The file of the held-out tasks of evaluations, if there are any."""
    ended: str = ""
    """The reason if settings of the run (patience, guard) ended it before its last step. It counts as finished then."""


def sum_up(
    run: Path,
    state: Checkpoint,
    *,
    finished: bool,
    lost_records: int,
    seconds: float,
    held_out: str = "",
    ended: str = "",
) -> RunSummary:
    """Return the summary of the run in a folder, from its metrics and its `state`."""
    with OpenedRun(run) as opened:
        lines = opened.metrics
        headline = opened.headline
    left_out: Counter[str] = Counter()
    for line in lines:
        left_out.update(line["left_out"])
    # For each trained role that made no call in the last step, the number of steps in a row without a call.
    silent_steps: dict[str, int] = {}
    if lines:
        silent_steps = lines[-1].get("silent", {})
    least_reported = min(SILENT_STEPS, len(lines))
    return RunSummary(
        path=str(run),
        steps=state.steps,
        finished=finished,
        versions=dict(state.versions),
        headline=headline,
        calls=sum(line["calls"] for line in lines),
        candidates=sum(line["candidates"] for line in lines),
        groups=sum(line["groups"] for line in lines),
        left_out=dict(left_out),
        lost_records=lost_records,
        seconds=seconds,
        stayed={name: why for name, why in stayed_reasons(lines).items() if name not in state.versions},
        silent={role: steps for role, steps in silent_steps.items() if steps >= least_reported},
        held_out=held_out,
        ended=ended,
    )
