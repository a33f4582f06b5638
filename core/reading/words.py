"""A run's figures as text, the same on every screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cotune.intervals import Interval
from cotune.reading.headline import Change
from cotune.tables import figure, plural


def interval_text(interval: Interval | None, percent: bool = False) -> str:
    """An interval as text: `41.2% [29.4%, 53.9%]`; without bounds only the mean; empty for None."""
    if interval is None:
        return ""
    text = figure(interval.mean, percent)
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{figure(interval.low, percent)}, {figure(interval.high, percent)}]"


def change_text(change: Change) -> str:
    """A change of a figure as text.

    `held-out success on test.jsonl: base 41.2% [29.4%, 53.9%] of 64, trained 57.8% [45.6%, 69.1%] of 64`.
    """
    ends: list[tuple[str, Interval, int]] = []
    if change.first:
        ends.append((change.first_of, change.first, change.first_failed))
    ends.append((change.last_of, change.last, change.last_failed))
    texts: list[str] = []
    for source, interval, failed in ends:
        text = interval_text(interval, change.percent)
        if interval.n:
            text += f" {'of' if change.percent else 'over'} {interval.n:,}"
        # A mode of an evaluation comes before its figure, a step after it: `base 41.2% of 64`, `41.2% in step 3`.
        text = f"{text} in {source}" if source.startswith("step ") else f"{source} {text}".strip()
        if failed:
            text += f", {failed:,} failed"
        texts.append(text)
    return f"{figure_name(change)}: {', '.join(texts)}"


def figure_name(change: Change) -> str:
    """The name of a figure with its set of tasks: `held-out success on test.jsonl`."""
    return f"{change.name} on {change.tasks}" if change.tasks else change.name


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
