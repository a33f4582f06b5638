"""Spans of work, what a process gives of them, and the table that they add up to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from cotune.errors import error_line

_SAMPLER = ("sampling", "decode", "prefill", "load")
PARTS: dict[str, tuple[str, ...]] = {
    "rollout": ("profiler", *_SAMPLER, "scorers", "answering", "application"),
    "evaluate": ("profiler", *_SAMPLER, "scorers", "answering", "application"),
    "update": ("profiler", "forward", "backward", "optimizer"),
    "publish": ("profiler", "forward", *_SAMPLER),
}
"""The parts of a phase: a moment counts for the first one that is running. Other phases are not divided."""
OTHER = "other"
_ORDER = (
    "prefill", "decode", "sampling", "load", "scorers", "answering", "application",
    "forward", "backward", "optimizer", "profiler", OTHER,
)  # fmt: skip


class Span(msgspec.Struct, frozen=True, gc=False):
    """Work from and to a time in seconds since 1970; `process` and `thread` are those that did it, if known."""

    name: str
    began: float
    ended: float
    process: int = 0
    thread: int = 0


class Trace(NamedTuple):
    """The work of one process; `operators` are events of Chrome's trace format, of which `left_out` were too many.
    `notes` say what could not be traced."""

    spans: list[Span]
    operators: list[dict[str, Any]]
    left_out: int = 0
    notes: tuple[str, ...] = ()


def untraced(name: str, reason: str) -> Trace:
    """The trace of a learner or sampler that gives none."""
    return Trace([], [], 0, (f"not traced: {name}: {reason}",))


async def traced(name: str, call: Callable[[], Awaitable[list[Trace] | None]]) -> list[Trace]:
    """What `begin_trace` or `end_trace` of a sampler returns; where it fails, a trace that says why: no run ends for
    that."""
    try:
        return await call() or []
    except Exception as error:  # noqa: BLE001, an engine may be of any kind
        return [untraced(name, error_line(error))]


class ProfileRow(msgspec.Struct, frozen=True):
    """Seconds of the step that count for a part of a phase. The part ran for `busy` seconds, which may be more: while
    an earlier part of `PARTS` was running too."""

    phase: str
    part: str
    seconds: float
    busy: float


def breakdown(whole: Span, phases: Sequence[Span], parts: Sequence[Span]) -> tuple[ProfileRow, ...]:
    """The rows of a step that lasted as long as `whole`: each moment counts once. `phases` do not overlap; `parts` may.

    Time of a divided phase in which no part runs is its part `other`; time outside of phases is the phase `other`.
    """
    rows: list[ProfileRow] = []
    for name in dict.fromkeys(phase.name for phase in phases):
        windows = [(phase.began, phase.ended) for phase in phases if phase.name == name]
        total = _length(windows)
        divided: list[ProfileRow] = []
        counted: list[tuple[float, float]] = []
        for part in PARTS.get(name, ()):
            own = _within([(span.began, span.ended) for span in parts if span.name == part], windows)
            if own:
                both = _union([*counted, *own])
                divided.append(ProfileRow(name, part, _length(both) - _length(counted), _length(_union(own))))
                counted = both
        rest = total - _length(counted)
        divided.append(ProfileRow(name, OTHER if counted else "", rest, rest))
        rows += sorted(divided, key=lambda row: _ORDER.index(row.part or OTHER))
    rest = whole.ended - whole.began - sum(row.seconds for row in rows)
    return (*rows, ProfileRow(OTHER, "", rest, rest))


def _within(spans: Iterable[tuple[float, float]], windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of `spans` inside `windows`."""
    cut = [(max(began, low), min(ended, high)) for began, ended in spans for low, high in windows]
    return [(began, ended) for began, ended in cut if began < ended]


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments, in order and without overlaps."""
    joined: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((began, ended))
    return joined


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(ended - began for began, ended in spans)
