"""A run's figures as text, the same wherever they are printed."""

from __future__ import annotations

from cotune.intervals import Interval
from cotune.reading.headline import Change
from cotune.tables import figure


def interval_text(found: Interval | None, percent: bool = False) -> str:
    """`41.2% [29.4%, 53.9%]`; without an interval the figure alone, and empty for None."""
    if found is None:
        return ""
    text = figure(found.mean, percent)
    if found.low is None or found.high is None:
        return text
    return f"{text} [{figure(found.low, percent)}, {figure(found.high, percent)}]"


def change_text(change: Change) -> str:
    """`held-out success: base 41.2% [29.4%, 53.9%] of 64, trained 57.8% [45.6%, 69.1%] of 64, 3 failed`."""
    first, last = change.first, change.last
    ends = [(change.first_of, first, change.first_failed)] if first else []
    ends.append((change.last_of, last, change.last_failed))
    return f"{change.name}: {', '.join(_end(change, *end) for end in ends)}"


def _end(change: Change, of: str, found: Interval, failed: int) -> str:
    said = interval_text(found, change.percent)
    if found.n:
        said += f" {'of' if change.percent else 'over'} {found.n:,}"
    said = f"{said} in {of}" if of.startswith("step ") else f"{of} {said}".strip()
    return f"{said}, {failed:,} failed" if failed else said
