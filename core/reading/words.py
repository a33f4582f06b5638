"""A run's figures as text, the same on every screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cotune.intervals import Interval
from cotune.reading.headline import Change
from cotune.tables import figure, plural


def interval_text(interval: Interval | None, percent: bool = False) -> str:
    """`41.2% [29.4%, 53.9%]`; without bounds only the mean; empty for None."""
    if interval is None:
        return ""
    text = figure(interval.mean, percent)
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{figure(interval.low, percent)}, {figure(interval.high, percent)}]"


def change_text(change: Change) -> str:
    """`held-out success on test.jsonl: base 41.2% [29.4%, 53.9%] of 64, trained 57.8% [45.6%, 69.1%] of 64`."""
    first = change.first
    last = change.last
    ends = [(change.first_of, first, change.first_failed)] if first else []
    ends.append((change.last_of, last, change.last_failed))
    return f"{figure_name(change)}: {', '.join(_end(change, *end) for end in ends)}"


def figure_name(change: Change) -> str:
    """The name of a figure with its set of tasks: `held-out success on test.jsonl`."""
    return f"{change.name} on {change.tasks}" if change.tasks else change.name


def _end(change: Change, source: str, interval: Interval, failed: int) -> str:
    """One of the two figures of a change: `base 41.2% [29.4%, 53.9%] of 64`, or `41.2% of 64 in step 3`."""
    text = interval_text(interval, change.percent)
    if interval.n:
        text += f" {'of' if change.percent else 'over'} {interval.n:,}"
    text = f"{text} in {source}" if source.startswith("step ") else f"{source} {text}".strip()
    return f"{text}, {failed:,} failed" if failed else text


def stayed_reasons(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The reasons why each policy was not updated, with the number of steps in metrics.jsonl, the commonest first."""
    reasons: dict[str, Counter[str]] = {}
    for line in lines:
        for policy, reason in line.get("stayed", {}).items():
            reasons.setdefault(policy, Counter())[reason] += 1
    return {policy: dict(counts.most_common()) for policy, counts in sorted(reasons.items())}


def stayed_text(reasons: Mapping[str, int]) -> str:
    """`no sample in 4 of 5 steps, no signal in 1`."""
    (first, count), *others = reasons.items()
    text = f"{first} in {count:,} of {plural(sum(reasons.values()), 'step')}"
    return ", ".join([text, *(f"{reason} in {steps:,}" for reason, steps in others)])
