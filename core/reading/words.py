"""A run's figures as text, the same wherever they are printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cotune.intervals import Interval
from cotune.reading.headline import Change
from cotune.tables import figure, plural


def interval_text(found: Interval | None, percent: bool = False) -> str:
    """`41.2% [29.4%, 53.9%]`; without an interval the figure alone, and empty for None."""
    if found is None:
        return ""
    text = figure(found.mean, percent)
    if found.low is None or found.high is None:
        return text
    return f"{text} [{figure(found.low, percent)}, {figure(found.high, percent)}]"


def change_text(change: Change) -> str:
    """`held-out success on test.jsonl: base 41.2% [29.4%, 53.9%] of 64, trained 57.8% [45.6%, 69.1%] of 64`."""
    first, last = change.first, change.last
    ends = [(change.first_of, first, change.first_failed)] if first else []
    ends.append((change.last_of, last, change.last_failed))
    return f"{figure_name(change)}: {', '.join(_end(change, *end) for end in ends)}"


def figure_name(change: Change) -> str:
    """The name of a figure with its set of tasks: `held-out success on test.jsonl`."""
    return f"{change.name} on {change.tasks}" if change.tasks else change.name


def _end(change: Change, of: str, found: Interval, failed: int) -> str:
    said = interval_text(found, change.percent)
    if found.n:
        said += f" {'of' if change.percent else 'over'} {found.n:,}"
    said = f"{said} in {of}" if of.startswith("step ") else f"{of} {said}".strip()
    return f"{said}, {failed:,} failed" if failed else said


def stayed_reasons(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """By policy, in how many steps of metrics.jsonl it stayed as it was for which reason, the commonest first."""
    found: dict[str, Counter[str]] = {}
    for line in lines:
        for policy, why in line.get("stayed", {}).items():
            found.setdefault(policy, Counter())[why] += 1
    return {policy: dict(why.most_common()) for policy, why in sorted(found.items())}


def stayed_text(reasons: Mapping[str, int]) -> str:
    """`no sample in 4 of 5 steps, no signal in 1`."""
    (first, count), *rest = reasons.items()
    said = f"{first} in {count:,} of {plural(sum(reasons.values()), 'step')}"
    return ", ".join([said, *(f"{why} in {times:,}" for why, times in rest)])
