"""The calls of an episode in time: a lane for each role and one for its tools, what is parallel one below the other,
arrows from what a call read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from cotune.records.structs import ToolResult

WIDTH, LABELS = 960, 130
"""Units of the drawing: its width, and the width of the roles' names."""
ROW, GAP = 26, 10
_LEAST = 10.0
"""Width of the shortest call."""
MOST_CALLS = 400
"""Calls and uses of tools that are drawn, the first ones of each."""
_TOOLS = "\0tools"
"""Name of the tools' lane, which no role has."""


class TimedCall(msgspec.Struct, frozen=True):
    """A call as the timeline draws it; times in seconds. `parents` are recorded, `guessed` are the other calls that it
    quotes."""

    id: str
    step: int
    role: str
    turn: int
    status: str
    started: float
    latency: float
    parents: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()


class Bar(msgspec.Struct, frozen=True):
    """A call as a box."""

    call: TimedCall
    x: float
    y: float
    width: float


class ToolBar(msgspec.Struct, frozen=True):
    """A use of a tool as a box."""

    name: str
    latency: float
    x: float
    y: float
    width: float


class Lane(msgspec.Struct, frozen=True):
    """A role's name and where its rows begin and end."""

    role: str
    y: float
    height: float


class Tick(msgspec.Struct, frozen=True):
    """A mark of the time axis."""

    x: float
    text: str


class Arrow(msgspec.Struct, frozen=True):
    """A path from a call to one that read its output."""

    path: str
    guessed: bool


class Timeline(msgspec.Struct, frozen=True):
    """A drawing of calls and tools in time."""

    bars: tuple[Bar, ...] = ()
    tools: tuple[ToolBar, ...] = ()
    lanes: tuple[Lane, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    ticks: tuple[Tick, ...] = ()
    height: float = 0
    left_out: int = 0


def timeline(calls: Sequence[TimedCall], tools: Sequence[ToolResult] = ()) -> Timeline:
    """Lay out calls and uses of tools by time. What overlaps in one role gets rows of its own within its lane; tools
    have the last lane."""
    drawn = sorted(calls, key=lambda call: call.step)[:MOST_CALLS]
    used = sorted(tools, key=lambda tool: tool.started)[:MOST_CALLS]
    if not drawn:
        return Timeline()
    every: list[TimedCall | ToolResult] = [*drawn, *used]
    spans = [(one.started, one.started + one.latency) for one in every]
    began = min(start for start, _ in spans)
    lasted = max(max(end for _, end in spans) - began, 1e-6)
    scale = (WIDTH - LABELS - _LEAST) / lasted
    rows: dict[str, list[float]] = {}

    def placed(lane: str, one: TimedCall | ToolResult) -> tuple[float, int, float]:
        x, width = LABELS + (one.started - began) * scale, max(_LEAST, one.latency * scale)
        ends = rows.setdefault(lane, [])
        row = next((i for i, end in enumerate(ends) if end <= x + 1), len(ends))
        ends[row:] = [x + width, *ends[row + 1 :]]
        return x, row, width

    of_calls = [(call, *placed(call.role, call)) for call in drawn]
    of_tools = [(tool, *placed(_TOOLS, tool)) for tool in used]
    lanes, top = {}, 22.0
    for role, ends in rows.items():
        lanes[role] = Lane("tools" if role == _TOOLS else role, top, ROW * len(ends))
        top += ROW * len(ends) + GAP
    bars = {call.id: Bar(call, x, lanes[call.role].y + ROW * row, width) for call, x, row, width in of_calls}
    return Timeline(
        bars=tuple(bars.values()),
        tools=tuple(
            ToolBar(tool.name, tool.latency, x, lanes[_TOOLS].y + ROW * row, width) for tool, x, row, width in of_tools
        ),
        lanes=tuple(lanes.values()),
        arrows=tuple(
            Arrow(_path(bars[read], bar), guessed)
            for bar in bars.values()
            for reads, guessed in ((bar.call.parents, False), (bar.call.guessed, True))
            for read in reads
            if read in bars
        ),
        ticks=tuple(_ticks(lasted, scale)),
        height=top,
        left_out=len(calls) - len(drawn) + len(tools) - len(used),
    )


def _ticks(lasted: float, scale: float) -> Iterator[Tick]:
    """Marks for an axis of so many seconds: at most seven multiples of 1, 2 or 5 of a unit."""
    sizes = (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")
    unit, name = sizes[sum(lasted >= most for most in (1.0, 100.0, 6000.0))]
    decade = 10.0 ** math.floor(math.log10(lasted / unit))
    size = next(part * decade for part in (0.2, 0.5, 1, 2, 5) if lasted / unit < 7 * part * decade)
    for place in range(int(lasted / unit / size + 1e-9) + 1):
        yield Tick(LABELS + place * size * unit * scale, f"{place * size:g} {name}" if place else "0")


def _path(read: Bar, reader: Bar) -> str:
    x1, y1 = read.x + read.width, read.y + ROW / 2 - 2
    x2, y2 = reader.x, reader.y + ROW / 2 - 2
    bend = max(12.0, abs(x2 - x1) / 2)
    return f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
