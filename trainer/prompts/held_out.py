"""The verdict of a search: its best prompts against the prompts before, on tasks that the search has not used."""

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
from cotune.trainer.prompts.task_result import TaskResult

Verdict = Literal["better", "worse", "not shown"]


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of the best prompts with the prompts before, on held-out tasks."""

    tasks: int
    """Number of tasks that are compared."""
    base: float
    """Mean outcome with the prompts before."""
    best: float
    """Mean outcome with the best prompts."""
    difference: Interval
    asked: int
    """Number of candidates that were tested on these tasks, including this one."""
    level: float
    """Level of the interval of the difference: 95% over all these candidates together (Bonferroni)."""
    prompt_tokens: tuple[float, float]
    """Prompt tokens of a run, before and after."""
    unmatched: int = 0
    """Number of calls without the text that the edits replace."""
    unknown: int = 0
    """Number of tasks that are left out, because a run on them did not fail and has no outcome."""

    @property
    def verdict(self) -> Verdict:
        low = self.difference.low
        high = self.difference.high
        if low is None or high is None or low <= 0 <= high:
            return "not shown"
        return "better" if low > 0 else "worse"

    def to_json(self) -> dict[str, Any]:
        """The comparison as it is stored with the best prompts."""
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
    """Run both prompts on each held-out task once, and compare them; None if no outcome is known.

    Raises as `Evaluations.run` does.
    """
    before = await evaluations.run(base, tasks, phase=HELD_OUT)
    after = await evaluations.run(best, tasks, phase=HELD_OUT)
    candidates = evaluations.candidates_of(HELD_OUT) - {base.id}
    return compare_results(before, after, asked=max(len(candidates), 1))


def compare_results(before: Sequence[TaskResult], after: Sequence[TaskResult], *, asked: int = 1) -> HeldOut | None:
    """Compare the results of two prompts on the same tasks; None if no outcome is known.

    A failed episode counts with the lowest outcome of both, at most 0. An episode that did not fail may still have no
    outcome, for example because the judge did not answer. This says nothing about the prompts, so its task is left out.
    `asked` is the number of candidates that were compared on these tasks.
    """
    results = [*before, *after]
    outcomes = [result.outcome for result in results if result.outcome is not None]
    if not outcomes:
        return None
    floor = min(0.0, *outcomes)
    unknown = {result.task for result in results if result.outcome is None and not result.error}
    outcomes_before = _outcome_by_task(before, floor, unknown)
    outcomes_after = _outcome_by_task(after, floor, unknown)
    # With several candidates, each gets a wider interval, so that all of them together are wrong in 5% of searches
    # (Bonferroni).
    level = 1 - (1 - LEVEL) / asked
    difference = paired_difference(outcomes_after, outcomes_before, level)
    if difference is None:
        return None
    return HeldOut(
        tasks=len(outcomes_before),
        base=fmean(outcomes_before.values()),
        best=fmean(outcomes_after.values()),
        difference=difference,
        asked=asked,
        level=level,
        prompt_tokens=(_mean_tokens(before), _mean_tokens(after)),
        unmatched=sum(sum(result.unmatched.values()) for result in after),
        unknown=len(unknown),
    )


def _outcome_by_task(results: Sequence[TaskResult], floor: float, left_out: Collection[str]) -> Mapping[str, float]:
    """Return the outcome of each task that is not left out; `floor` if it failed."""
    outcomes: dict[str, float] = {}
    for result in results:
        if result.task not in left_out:
            outcomes[result.task] = floor if result.outcome is None else result.outcome
    return outcomes


def _mean_tokens(results: Sequence[TaskResult]) -> float:
    return fmean(result.prompt_tokens for result in results)
