"""What a search is worth: its best prompts and those before, on tasks that it has not seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import msgspec

from cotune.intervals import LEVEL, Interval
from cotune.prompts.edits import Prompts
from cotune.records.structs import Task
from cotune.trainer.evaluation.statistics import paired_difference
from cotune.trainer.prompts.evaluations import HELD_OUT, Evaluations
from cotune.trainer.prompts.tried import Tried

Verdict = Literal["better", "worse", "not shown"]


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison. `asked` are the candidates that these tasks have been asked about, this one included, and
    `level` is that of the interval: 95% over all of them (Bonferroni)."""

    tasks: int
    base: float
    best: float
    difference: Interval
    asked: int
    level: float
    prompt_tokens: tuple[float, float]
    """A run, before and after."""
    unmatched: int = 0
    """Calls to which the edits did not apply."""
    unknown: int = 0
    """Tasks that are left out, as a run on them ended well and nobody knows its outcome."""

    @property
    def verdict(self) -> Verdict:
        low, high = self.difference.low, self.difference.high
        if low is None or high is None or low <= 0 <= high:
            return "not shown"
        return "better" if low > 0 else "worse"

    def to_json(self) -> dict[str, Any]:
        return {
            "tasks": self.tasks,
            "base": self.base,
            "best": self.best,
            "difference": [self.difference.low, self.difference.mean, self.difference.high],
            "asked": self.asked,
            "level": self.level,
            "prompt_tokens": list(self.prompt_tokens),
            "unmatched": self.unmatched,
            "unknown": self.unknown,
        }


async def compare_held_out(
    evaluations: Evaluations, base: Prompts, best: Prompts, tasks: Sequence[Task]
) -> HeldOut | None:
    """Run both on the held-out tasks, once each; None where no outcome is known.

    Raises as `Evaluations.run` does.
    """
    before = await evaluations.run(base, tasks, phase=HELD_OUT)
    after = await evaluations.run(best, tasks, phase=HELD_OUT)
    asked = len(evaluations.asked(HELD_OUT) - {base.id})
    return compared(before, after, asked=max(asked, 1))


def compared(before: Sequence[Tried], after: Sequence[Tried], *, asked: int = 1) -> HeldOut | None:
    """The comparison of two runs of the same tasks; None where no outcome is known.

    A failed episode counts the lowest outcome of both, and at most 0. A task is left out where an episode did not fail
    and has no outcome, as of a judge that could not be asked: that says nothing of the prompts.
    """
    known = [one.outcome for one in (*before, *after) if one.outcome is not None]
    if not known:
        return None
    floor = min(0.0, *known)
    unknown = {one.task for one in (*before, *after) if one.outcome is None and not one.error}
    was, now = _outcomes(before, floor, unknown), _outcomes(after, floor, unknown)
    level = 1 - (1 - LEVEL) / asked
    difference = paired_difference(now, was, level)
    if difference is None:
        return None
    return HeldOut(
        tasks=len(was),
        base=fmean(was.values()),
        best=fmean(now.values()),
        difference=difference,
        asked=asked,
        level=level,
        prompt_tokens=(_tokens(before), _tokens(after)),
        unmatched=sum(sum(one.unmatched.values()) for one in after),
        unknown=len(unknown),
    )


def _outcomes(tried: Sequence[Tried], floor: float, unknown: Collection[str]) -> Mapping[str, float]:
    return {one.task: floor if one.outcome is None else one.outcome for one in tried if one.task not in unknown}


def _tokens(tried: Sequence[Tried]) -> float:
    return fmean(one.prompt_tokens for one in tried)
