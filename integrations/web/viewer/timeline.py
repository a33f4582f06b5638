"""Lays out the calls of an episode as a timeline, and its roles as a graph.

The timeline has a lane for each role and one for tools. Parallel calls of a role stand one below the other. An arrow
leads to a call from each call whose answer it read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

WIDTH = 960
LABELS = 130
"""Width of the drawing, and of the roles' names on its left, in units of the drawing."""
ROW = 26
GAP = 10
"""Height of a row, and the space between lanes."""
_TOP = 22.0
"""Height of the labels of the time axis, above the lanes."""
_LEAST = 10.0
"""Width of the shortest call."""
MOST_CALLS = 400
"""Most calls, and most uses of tools, that are drawn; the first ones of each are."""
_LEAST_DISTANCE = 130
"""Least distance between two roles of the graph."""
_LETTER = 9
"""Width of a letter in the name of a role."""
_HALF_NODE = 13
"""Half the height of a node."""
_HALF_LOOP = 12
_LOOP_BEND = 34
"""Distances from the middle of a node to the ends of an arc that leads to the same node, and to its control points."""
_TOOLS = "\0tools"
"""Key of the tools' lane, different from any role."""


class TimedCall(msgspec.Struct, frozen=True):
    """A call in time, in seconds. It read the answers of its recorded `parents`, and probably those of `guessed` calls,
    which its prompt quotes."""

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
    """The box of a call."""

    call: TimedCall
    x: float
    y: float
    width: float


class UsedTool(msgspec.Struct, frozen=True):
    """A use of a tool, with times in seconds."""

    name: str
    started: float
    latency: float
    at_most: bool = False
    """Whether its time was not recorded. It ran at some time between the call that requested it and the call that got
    its result."""


class ToolBar(msgspec.Struct, frozen=True):
    """The box of a use of a tool."""

    tool: UsedTool
    x: float
    y: float
    width: float


class Lane(msgspec.Struct, frozen=True):
    """The lane of a role: its upper edge and its height."""

    role: str
    y: float
    height: float


class Tick(msgspec.Struct, frozen=True):
    """A mark of the time axis."""

    x: float
    text: str


class Arrow(msgspec.Struct, frozen=True):
    """The path from a call to another call that read its answer."""

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
    """Lay out calls and uses of tools by time.

    Overlapping calls of a role get separate rows in its lane. Tools have the last lane.
    """
    drawn_calls = sorted(calls, key=lambda call: call.step)[:MOST_CALLS]
    drawn_tools = sorted(tools, key=lambda tool: tool.started)[:MOST_CALLS]
    if not drawn_calls:
        return Timeline()
    # 1. Scale the time to the width of the drawing.
    items: list[TimedCall | UsedTool] = [*drawn_calls, *drawn_tools]
    began = min(item.started for item in items)
    ended = max(item.started + item.latency for item in items)
    seconds = max(ended - began, 1e-6)
    scale = (WIDTH - LABELS - _LEAST) / seconds

    # 2. Give each item a row of its lane. There is a lane for each role, and one for tools.
    rows = _Rows(began, scale)
    boxes_of_calls = [rows.place(call.role, call) for call in drawn_calls]
    boxes_of_tools = [rows.place(_TOOLS, tool) for tool in drawn_tools]

    # 3. Stack the lanes, now that their numbers of rows are known, and draw the items in them.
    lanes: dict[str, Lane] = {}
    top = _TOP
    for lane, row_ends in rows.ends.items():
        height = ROW * len(row_ends)
        lanes[lane] = Lane("tools" if lane == _TOOLS else lane, top, height)
        top += height + GAP
    bars: dict[str, Bar] = {}
    for call, box in zip(drawn_calls, boxes_of_calls, strict=True):
        bars[call.id] = Bar(call, box.x, lanes[call.role].y + ROW * box.row, box.width)
    tool_bars = []
    for tool, box in zip(drawn_tools, boxes_of_tools, strict=True):
        tool_bars.append(ToolBar(tool, box.x, lanes[_TOOLS].y + ROW * box.row, box.width))

    # 4. Draw an arrow to each call from the drawn calls that it read.
    arrows = []
    for bar in bars.values():
        arrows += [Arrow(_arrow_path(bars[id], bar), guessed=False) for id in bar.call.parents if id in bars]
        arrows += [Arrow(_arrow_path(bars[id], bar), guessed=True) for id in bar.call.guessed if id in bars]
    return Timeline(
        bars=tuple(bars.values()),
        tools=tuple(tool_bars),
        lanes=tuple(lanes.values()),
        arrows=tuple(arrows),
        ticks=tuple(_ticks(seconds, scale)),
        height=top,
        left_out=len(calls) - len(drawn_calls) + len(tools) - len(drawn_tools),
    )


class _Box(NamedTuple):
    """The place of an item in its lane: its left edge, the number of its row, and its width."""

    x: float
    row: int
    width: float


class _Rows:
    """Puts each item into the first row of its lane that is free by then."""

    def __init__(self, began: float, scale: float) -> None:
        """`began` is the time at the left edge, and `scale` the width of a second."""
        self._began = began
        self._scale = scale
        self.ends: dict[str, list[float]] = {}
        """For each lane, the right edge of the last box in each of its rows."""

    def place(self, lane: str, item: TimedCall | UsedTool) -> _Box:
        """Give an item the first row of this lane that is free at its start, or a new row."""
        x = LABELS + (item.started - self._began) * self._scale
        width = max(_LEAST, item.latency * self._scale)
        row_ends = self.ends.setdefault(lane, [])
        for row, end in enumerate(row_ends):
            if end <= x + 1:  # boxes may overlap by a pixel, which rounding can cause
                row_ends[row] = x + width
                return _Box(x, row, width)
        row_ends.append(x + width)
        return _Box(x, len(row_ends) - 1, width)


def _ticks(seconds: float, scale: float) -> Iterator[Tick]:
    """The marks of a time axis that is `seconds` long. There are at most seven, at multiples of 1, 2 or 5 times a power
    of ten. `scale` is pixels per second.
    """
    if seconds < 1.0:
        unit, unit_name = 1e-3, "ms"
    elif seconds < 100.0:
        unit, unit_name = 1.0, "s"
    elif seconds < 6000.0:
        unit, unit_name = 60.0, "min"
    else:
        unit, unit_name = 3600.0, "h"
    length = seconds / unit
    power_of_ten = 10.0 ** math.floor(math.log10(length))
    distances = [factor * power_of_ten for factor in (0.2, 0.5, 1, 2, 5)]
    distance = next(distance for distance in distances if length < 7 * distance)
    # A small number is added, as 0.3 / 0.1 is less than 3 in floating point.
    n_distances = int(length / distance + 1e-9)
    for number in range(n_distances + 1):
        text = f"{number * distance:g} {unit_name}" if number else "0"
        yield Tick(LABELS + number * distance * unit * scale, text)


def _arrow_path(read: Bar, reader: Bar) -> str:
    """The SVG path of a curve from the right edge of the call that was read to the left edge of its reader."""
    half_height = (ROW - 4) / 2  # of a bar, which is a little lower than its row
    start_x = read.x + read.width
    start_y = read.y + half_height
    end_x = reader.x
    end_y = reader.y + half_height
    bend = max(12.0, abs(end_x - start_x) / 2)
    return (
        f"M{start_x:.1f} {start_y:.1f}C{start_x + bend:.1f} {start_y:.1f} "
        f"{end_x - bend:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
    )


class Node(msgspec.Struct, frozen=True):
    """A role of the graph, and the number of its calls."""

    role: str
    calls: int
    x: float


class Edge(msgspec.Struct, frozen=True):
    """The reads of one role's answers by another role, or by itself: `certain` and `guessed` ones, drawn as one path.
    Their number stands at `x` and `y`."""

    source: str
    target: str
    certain: int
    guessed: int
    path: str
    x: float
    y: float


class RoleGraph(msgspec.Struct, frozen=True):
    """The roles of an episode in a line, with arcs between roles that read each other's answers. Arcs to the right are
    above the line, arcs to the left below it."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    line: float
    width: float
    height: float


def role_graph(calls: Sequence[TimedCall]) -> RoleGraph | None:
    """Lay out the graph of an episode's roles: a row of nodes in the order of their first calls, and an arc from each
    role to the roles that read its answers. None if no call read another.

    Arcs to the right rise above the row and arcs to the left go below it, higher the further they reach, so that they
    do not lie on each other. `certain` and `guessed` count the reads of an arc.
    """
    roles = Counter(call.role for call in sorted(calls, key=lambda call: call.step))
    role_of_call = {call.id: call.role for call in calls}
    certain: Counter[tuple[str, str]] = Counter()
    guessed: Counter[tuple[str, str]] = Counter()
    for call in calls:
        certain.update((role_of_call[id], call.role) for id in call.parents if id in role_of_call)
        guessed.update((role_of_call[id], call.role) for id in call.guessed if id in role_of_call)
    pairs = sorted({*certain, *guessed})
    if not pairs:
        return None

    # 1. Put the nodes side by side, far enough apart for their names.
    distance = max(_LEAST_DISTANCE, _LETTER * max(len(role) for role in roles) + 24)
    positions = {role: position for position, role in enumerate(roles)}
    node_x = {role: distance * (position + 0.5) for role, position in positions.items()}
    nodes = tuple(Node(role, count, node_x[role]) for role, count in roles.items())

    # 2. Leave the space that arcs and their counts need above and below the row of nodes.
    rises = {(source, target): _rise(positions[target] - positions[source]) for source, target in pairs}
    above = max([24.0, *(rise + 16 for rise in rises.values() if rise > 0)])
    below = max([30.0, *(16 - rise for rise in rises.values() if rise < 0)])
    row_y = above + 6

    # 3. Draw an arc for each pair.
    edges = []
    for (source, target), rise in rises.items():
        path = _arc(node_x[source], node_x[target], row_y, rise)
        label_x = (node_x[source] + node_x[target]) / 2
        # The count stands outside of the arc. Its y is its lower edge, so below an arc it needs its own height too.
        label_y = row_y - rise - 9 if rise > 0 else row_y - rise + 18
        pair = (source, target)
        edges.append(Edge(source, target, certain[pair], guessed[pair], path, label_x, label_y))
    return RoleGraph(nodes, tuple(edges), row_y, distance * len(roles), row_y + below + 12)


def _rise(places: int) -> float:
    """Height of an arc that leads `places` nodes to the right, or to the left if it is negative.

    Arcs to the left go below the row, so their height is negative. An arc to the same node has 0 places.
    """
    height = 26.0 + 14 * min(abs(places), 8)
    return height if places >= 0 else -height


def _arc(source_x: float, target_x: float, row_y: float, rise: float) -> str:
    """The path of an arc between two nodes, or of a loop at one node. Its middle is `rise` above the row of nodes."""
    start_x, end_x = source_x, target_x
    bend_from_x, bend_to_x = source_x, target_x
    if source_x == target_x:  # a loop
        start_x, end_x = source_x - _HALF_LOOP, source_x + _HALF_LOOP
        bend_from_x, bend_to_x = source_x - _LOOP_BEND, source_x + _LOOP_BEND
    edge_y = row_y - _HALF_NODE if rise > 0 else row_y + _HALF_NODE
    bend_y = row_y - rise * 4 / 3  # a cubic curve reaches 3/4 of the way to its control points
    return (
        f"M{start_x:.1f} {edge_y:.1f}C{bend_from_x:.1f} {bend_y:.1f} "
        f"{bend_to_x:.1f} {bend_y:.1f} {end_x:.1f} {edge_y:.1f}"
    )
