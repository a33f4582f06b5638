"""The calls of an episode in time: a lane for each role and one for its tools, what is parallel one below the other,
arrows from what a call read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

WIDTH, LABELS = 960, 130
"""Units of the drawing: its width, and the width of the roles' names."""
ROW, GAP = 26, 10
_LEAST = 10.0
"""Width of the shortest call."""
MOST_CALLS = 400
"""Calls and uses of tools that are drawn, the first ones of each."""
_APART = 130
"""Least units between two roles of the graph."""
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


class UsedTool(msgspec.Struct, frozen=True):
    """A use of a tool; times in seconds. `at_most` says that its time is not on record: it was somewhere between the
    call that asked for it and the call that got its result."""

    name: str
    started: float
    latency: float
    at_most: bool = False


class ToolBar(msgspec.Struct, frozen=True):
    """A use of a tool as a box."""

    tool: UsedTool
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


def timeline(calls: Sequence[TimedCall], tools: Sequence[UsedTool] = ()) -> Timeline:
    """Lay out calls and uses of tools by time. What overlaps in one role gets rows of its own within its lane; tools
    have the last lane."""
    drawn = sorted(calls, key=lambda call: call.step)[:MOST_CALLS]
    used = sorted(tools, key=lambda tool: tool.started)[:MOST_CALLS]
    if not drawn:
        return Timeline()
    every: list[TimedCall | UsedTool] = [*drawn, *used]
    spans = [(one.started, one.started + one.latency) for one in every]
    began = min(start for start, _ in spans)
    lasted = max(max(end for _, end in spans) - began, 1e-6)
    scale = (WIDTH - LABELS - _LEAST) / lasted
    rows: dict[str, list[float]] = {}

    def placed(lane: str, one: TimedCall | UsedTool) -> tuple[float, int, float]:
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
        tools=tuple(ToolBar(tool, x, lanes[_TOOLS].y + ROW * row, width) for tool, x, row, width in of_tools),
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


class Node(msgspec.Struct, frozen=True):
    """A role of the graph, and how many calls it made."""

    role: str
    calls: int
    x: float


class Edge(msgspec.Struct, frozen=True):
    """Reads of one role's answers by another, or by itself: `certain` and `guessed` ones, drawn as one path; the number
    stands at `x` and `y`."""

    source: str
    target: str
    certain: int
    guessed: int
    path: str
    x: float
    y: float


class RoleGraph(msgspec.Struct, frozen=True):
    """Who read whom in an episode: roles in a line, arcs to the right above it, arcs to the left below it."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    line: float
    width: float
    height: float


def role_graph(calls: Sequence[TimedCall]) -> RoleGraph | None:
    """The graph of an episode's roles, in the order of their first calls; None where no call read another."""
    roles = Counter(call.role for call in sorted(calls, key=lambda call: call.step))
    of = {call.id: call.role for call in calls}
    certain, guessed = (
        Counter((of[id], call.role) for call in calls for id in getattr(call, name) if id in of)
        for name in ("parents", "guessed")
    )
    pairs = sorted({*certain, *guessed})
    if not pairs:
        return None
    places = {role: place for place, role in enumerate(roles)}
    apart = max(_APART, 9 * max(len(role) for role in roles) + 24)
    xs = {role: apart * (place + 0.5) for role, place in places.items()}
    rises = [_rise(places[source] - places[target]) for source, target in pairs]
    above = max([24.0, *(rise + 16 for rise in rises if rise > 0)])
    below = max([30.0, *(16 - rise for rise in rises if rise < 0)])
    line = above + 6
    edges = []
    for (source, target), rise in zip(pairs, rises, strict=True):
        x1, x2, top = xs[source], xs[target], line - rise * 4 / 3
        side = 13 if rise > 0 else -13
        if source == target:
            ends, bends = (x1 - 12, x1 + 12), (x1 - 34, x1 + 34)
        else:
            ends = bends = (x1, x2)
        end = line - side
        path = f"M{ends[0]:.1f} {end:.1f}C{bends[0]:.1f} {top:.1f} {bends[1]:.1f} {top:.1f} {ends[1]:.1f} {end:.1f}"
        counts = certain[source, target], guessed[source, target]
        edges.append(Edge(source, target, *counts, path, (x1 + x2) / 2, line - rise - (9 if rise > 0 else -18)))
    nodes = tuple(Node(role, count, xs[role]) for role, count in roles.items())
    return RoleGraph(nodes, tuple(edges), line, apart * len(roles), line + below + 12)


def _rise(step: int) -> float:
    """How high an arc is that spans so many places: above the line to the right or to itself, below it to the left."""
    size = 26.0 + 14 * min(abs(step), 8)
    return size if step <= 0 else -size
