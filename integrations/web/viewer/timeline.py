"""The calls of an episode in time: a lane for each role, parallel calls one below the other, lines to their parents."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotune.integrations.web.viewer.rendering import duration

WIDTH, LABELS = 960, 130
"""Units of the drawing: its width, and the width of the roles' names."""
ROW, GAP = 26, 10
_LEAST = 10.0
"""Width of the shortest call."""
MOST_CALLS = 400
"""Calls that are drawn, the first ones."""


class TimedCall(msgspec.Struct, frozen=True):
    """A call as the timeline draws it; times in seconds."""

    id: str
    step: int
    role: str
    turn: int
    status: str
    started: float
    latency: float
    parents: tuple[str, ...] = ()


class Bar(msgspec.Struct, frozen=True):
    """A call as a box."""

    call: TimedCall
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


class Timeline(msgspec.Struct, frozen=True):
    """A drawing: `reads` are paths from a call to one that read its output."""

    bars: tuple[Bar, ...]
    lanes: tuple[Lane, ...]
    reads: tuple[str, ...]
    ticks: tuple[Tick, ...]
    height: float
    left_out: int


def timeline(calls: Sequence[TimedCall]) -> Timeline:
    """Lay out calls by time. Calls of one role that overlap get rows of their own within its lane."""
    drawn = sorted(calls, key=lambda call: call.step)[:MOST_CALLS]
    if not drawn:
        return Timeline((), (), (), (), 0, 0)
    began = min(call.started for call in drawn)
    lasted = max(max(call.started + call.latency for call in drawn) - began, 1e-6)
    scale = (WIDTH - LABELS - _LEAST) / lasted
    rows: dict[str, list[float]] = {}
    places: list[tuple[TimedCall, int, float, float]] = []
    for call in drawn:
        x, width = LABELS + (call.started - began) * scale, max(_LEAST, call.latency * scale)
        ends = rows.setdefault(call.role, [])
        row = next((i for i, end in enumerate(ends) if end <= x + 1), len(ends))
        ends[row:] = [x + width, *ends[row + 1 :]]
        places.append((call, row, x, width))
    lanes, top = {}, 22.0
    for role, ends in rows.items():
        lanes[role] = Lane(role, top, ROW * len(ends))
        top += ROW * len(ends) + GAP
    bars = {call.id: Bar(call, x, lanes[call.role].y + ROW * row, width) for call, row, x, width in places}
    reads = [_path(bars[p], bar) for bar in bars.values() for p in bar.call.parents if p in bars]
    ticks = [Tick(LABELS + lasted * part * scale / 4, duration(lasted * part / 4)) for part in range(5)]
    left_out = len(calls) - len(drawn)
    return Timeline(tuple(bars.values()), tuple(lanes.values()), tuple(reads), tuple(ticks), top, left_out)


def _path(read: Bar, reader: Bar) -> str:
    x1, y1 = read.x + read.width, read.y + ROW / 2 - 2
    x2, y2 = reader.x, reader.y + ROW / 2 - 2
    bend = max(12.0, abs(x2 - x1) / 2)
    return f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
