"""The table of an ablation: means over the seeds, with intervals over seeds or over tasks, as their columns say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from cotune.intervals import Interval
from cotune.reading.by_setting import interval_over_runs
from cotune.trainer.evaluation.statistics import paired_difference
from examples.ablation.plan import Row


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A row evaluated for one seed: its figure by task, calls of an episode, and episodes that failed."""

    row: str
    seed: int
    digest: str
    """Identifies the runs that played, the held-out tasks and how they were played."""
    figure: str
    """`success`, or `reward` if the workflow reports no success."""
    by_task: dict[str, float]
    calls: float
    failed: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A row over all seeds. A gain is the difference from the same application untrained.

    `gain_over_seeds` says how much it varies from one training to another; `gain_over_tasks` only how much it varies
    between tasks, as if these trainings were all there are.
    """

    row: str
    title: str
    figure: str
    seeds: dict[int, float]
    mean: Interval
    calls: float
    failed: int
    gain_over_seeds: Interval | None = None
    gain_over_tasks: Interval | None = None


def lines(rows: Sequence[Row], results: Mapping[tuple[str, int], Result]) -> list[Line]:
    """One line for each row that has a result."""
    return [_line(row, results) for row in rows if any(name == row.name for name, _ in results)]


def _line(row: Row, results: Mapping[tuple[str, int], Result]) -> Line:
    of_row = {seed: result for (name, seed), result in results.items() if name == row.name}
    seeds = {seed: fmean(result.by_task.values()) for seed, result in sorted(of_row.items())}
    line = Line(
        row=row.name,
        title=row.title,
        figure=next(iter(of_row.values())).figure,
        seeds=seeds,
        mean=interval_over_runs(list(seeds.values())),
        calls=fmean(result.calls for result in of_row.values()),
        failed=sum(result.failed for result in of_row.values()),
    )
    if not row.before:
        return line

    # Runs of one seed are evaluated on the same tasks with the same random numbers: differences are paired.
    by_seed: dict[int, float] = {}
    after_by_task: dict[str, list[float]] = {}
    before_by_task: dict[str, list[float]] = {}
    for seed, result in of_row.items():
        before = results.get((row.before, seed))
        if before is None or before.figure != result.figure:
            continue
        shared = sorted(result.by_task.keys() & before.by_task.keys())
        if not shared:
            continue
        by_seed[seed] = fmean(result.by_task[task] - before.by_task[task] for task in shared)
        for task in shared:
            after_by_task.setdefault(task, []).append(result.by_task[task])
            before_by_task.setdefault(task, []).append(before.by_task[task])
    if not by_seed:
        return line
    return msgspec.structs.replace(
        line,
        gain_over_seeds=interval_over_runs(list(by_seed.values())),
        # The same test as in `cotune eval`, on each task's mean over the seeds.
        gain_over_tasks=paired_difference(_means(after_by_task), _means(before_by_task)),
    )


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task: fmean(of_task) for task, of_task in values.items()}


def markdown(table: Sequence[Line]) -> str:
    """The table as Markdown, with a sentence on how to read it."""
    text = [
        "| trained and evaluated as | mean | by seed | gain, and over seeds | over tasks | calls | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in table:
        by_seed = ", ".join(f"{value:.3f}" for value in line.seeds.values())
        bounds = _bounds(line.gain_over_tasks)
        text.append(
            f"| {line.title} | {line.mean.mean:.3f} | {by_seed} | {_shown(line.gain_over_seeds)} | {bounds} "
            f"| {line.calls:.1f} | {line.failed} |"
        )
    text += [
        "",
        "Gains are differences from the same application untrained, on the same tasks, with 95% intervals: over seeds, "
        "how much another training may differ; over tasks, with these trainings taken as given.",
    ]
    return "\n".join(text) + "\n"


def _shown(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.3f} (one seed)"
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def _bounds(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "-"
    return f"{interval.low:+.3f} to {interval.high:+.3f}"
