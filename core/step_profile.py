"""Where the seconds of one training step went: spans of work, and the table that they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

_SAMPLER = ("sampling", "decode", "prefill", "load")
PARTS: dict[str, tuple[str, ...]] = {
    "rollout": ("profiler", *_SAMPLER, "scorers", "answering", "application"),
    "evaluate": ("profiler", *_SAMPLER, "scorers", "answering", "application"),
    "update": ("profiler", "forward", "backward", "optimizer"),
    "publish": ("profiler", "forward", *_SAMPLER),
}
"""What a phase is divided into, the first that is under way at a moment getting it. Phases that are not named here are
not divided."""
OTHER = "other"
_ORDER = (
    "prefill", "decode", "sampling", "load", "scorers", "answering", "application",
    "forward", "backward", "optimizer", "profiler", OTHER,
)  # fmt: skip


class Span(msgspec.Struct, frozen=True, gc=False):
    """Something that was under way, from and to a time in seconds since 1970; `process` and `thread` are its own."""

    name: str
    began: float
    ended: float
    process: int = 0
    thread: int = 0


class Trace(NamedTuple):
    """What a process was traced to do; `operators` are events of Chrome's trace format, of which `left_out` were too
    many. `notes` say what could not be traced."""

    spans: list[Span]
    operators: list[dict[str, Any]]
    left_out: int = 0
    notes: tuple[str, ...] = ()


class ProfileRow(msgspec.Struct, frozen=True):
    """Seconds of the step that count as a part of a phase. The part was at work for `busy` seconds, which may be more:
    while something before it in `PARTS` was under way too."""

    phase: str
    part: str
    seconds: float
    busy: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A step (as its line names it, from 1) that took so many seconds, which `rows` add up to."""

    step: int
    seconds: float
    rows: tuple[ProfileRow, ...]
    notes: tuple[str, ...] = ()
    """What could not be measured."""
    trace: str = ""
    """File with the spans and operators, for https://ui.perfetto.dev."""


def breakdown(whole: Span, phases: Sequence[Span], parts: Sequence[Span]) -> tuple[ProfileRow, ...]:
    """The rows of a step that lasted as long as `whole`: each moment counts once. `phases` do not overlap; `parts` may.

    What no part of a divided phase accounts for is its part `other`; what is in no phase, the phase `other`.
    """
    rows: list[ProfileRow] = []
    for name in dict.fromkeys(phase.name for phase in phases):
        windows = [(phase.began, phase.ended) for phase in phases if phase.name == name]
        total = _length(windows)
        found: list[ProfileRow] = []
        before: list[tuple[float, float]] = []
        for part in PARTS.get(name, ()):
            own = _within([(span.began, span.ended) for span in parts if span.name == part], windows)
            if own:
                both = _union([*before, *own])
                found.append(ProfileRow(name, part, _length(both) - _length(before), _length(_union(own))))
                before = both
        found.append(ProfileRow(name, OTHER if before else "", total - _length(before), total - _length(before)))
        rows += sorted(found, key=lambda row: _ORDER.index(row.part or OTHER))
    rest = whole.ended - whole.began - sum(row.seconds for row in rows)
    return (*rows, ProfileRow(OTHER, "", rest, rest))


def print_profile(console: Console, profile: StepProfile) -> None:
    """A profiled step as a table, what is left out of it, and where its trace is, in one line to copy."""
    from rich.text import Text

    from cotune.tables import QUIET, cells, grid

    table = grid("phase", "part", "seconds>", "of the step>", "at work>", title=f"step {profile.step}")
    shown = ""
    for row in profile.rows:
        share = row.seconds / profile.seconds if profile.seconds else 0.0
        name, shown = "" if row.phase == shown else row.phase, row.phase
        busy = f"{row.busy:.2f}" if row.busy - row.seconds >= 0.005 else ""
        table.add_row(*cells((name, row.part, f"{row.seconds:.2f}", f"{share:.1%}", busy)))
    table.add_row(*cells(("all", "", f"{profile.seconds:.2f}", "100.0%", "")))
    console.print(table, *(Text(note, style=QUIET) for note in profile.notes), sep="\n")
    if profile.trace:
        console.print(Text(f"trace, to open at https://ui.perfetto.dev: {profile.trace}"), soft_wrap=True)


def _within(spans: Iterable[tuple[float, float]], windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of `spans` inside `windows`."""
    cut = [(max(began, low), min(ended, high)) for began, ended in spans for low, high in windows]
    return [(began, ended) for began, ended in cut if began < ended]


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments, in order and without overlaps."""
    made: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if made and began <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], ended))
        else:
            made.append((began, ended))
    return made


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(ended - began for began, ended in spans)
