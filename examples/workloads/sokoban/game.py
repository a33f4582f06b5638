"""Sokoban: its rules, its exact solution, and what each role sees of it as text.

A level is rows of text in the usual notation: `#` wall, `@` player, `$` box, `.` goal, `*` box on a goal, `+` player on
a goal. Cells are (x, y) from the top left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict

Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"up": (0, -1), "right": (1, 0), "down": (0, 1), "left": (-1, 0)}
TURNS = 4
"""Turns that each role has."""
MAX_PUSHES, MAX_MOVES = 2, 8
"""Pushes in one message of the planner, moves in one of the executor."""

PLANNER = "Say which box to push where."
EXECUTOR = "Walk and push as said."
ALONE = "Walk and push."


class Level(TypedDict):
    """A task: the rows of the level, and the fewest pushes that solve it."""

    id: str
    rows: list[str]
    pushes: int


@dataclass(frozen=True)
class Floor:
    """What never moves: the walls, and the goals of the boxes."""

    walls: frozenset[Cell]
    goals: frozenset[Cell]
    cells: frozenset[Cell]


@dataclass(frozen=True)
class Position:
    """Where the player and the boxes are."""

    player: Cell
    boxes: frozenset[Cell]


def parsed(rows: Sequence[str]) -> tuple[Floor, Position]:
    """The floor and the position of a level.

    Raises ValueError where the level is not closed by walls, has no player or more than one, or not a goal for each
    box.
    """
    at = {(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row)}
    players = [cell for cell, mark in at.items() if mark in "@+"]
    boxes = frozenset(cell for cell, mark in at.items() if mark in "$*")
    goals = frozenset(cell for cell, mark in at.items() if mark in ".*+")
    walls = frozenset(cell for cell, mark in at.items() if mark == "#")
    if len(players) != 1 or not boxes or len(boxes) != len(goals):
        raise ValueError("a level has one player, and as many goals as boxes, at least one")
    cells = frozenset(_within(walls, players[0], limit=len(at)))
    if not cells <= at.keys():
        raise ValueError("a level is closed by walls")
    return Floor(walls, goals, cells), Position(players[0], boxes)


def step(cell: Cell, move: str) -> Cell:
    """The cell one move away."""
    dx, dy = MOVES[move]
    return (cell[0] + dx, cell[1] + dy)


def moved(floor: Floor, position: Position, move: str) -> Position | None:
    """The position after a move, which pushes a box that is in the way; None where a wall or a second box stops it."""
    player = step(position.player, move)
    if player in floor.walls:
        return None
    if player not in position.boxes:
        return Position(player, position.boxes)
    box = step(player, move)
    if box in floor.walls or box in position.boxes:
        return None
    return Position(player, position.boxes - {player} | {box})


def solved(floor: Floor, position: Position) -> bool:
    """Whether each box is on a goal."""
    return position.boxes == floor.goals


def distance(floor: Floor, position: Position) -> int | None:
    """The fewest moves that solve the level from here; None when nothing can."""
    return _distances(floor).get(position)


def deadlocked(floor: Floor, position: Position) -> bool:
    """Whether no moves solve the level from here."""
    return distance(floor, position) is None


def carried_out(floor: Floor, position: Position, moves: Sequence[str]) -> tuple[Position, int]:
    """The position after moves, and how many of them did nothing; a solved level ends them."""
    bumps = 0
    for move in moves:
        if solved(floor, position):
            break
        after = moved(floor, position, move)
        bumps += after is None
        position = after or position
    return position, bumps


def way_to_push(floor: Floor, position: Position, box: Cell, pushes: Sequence[str]) -> list[str] | None:
    """The fewest moves that push a box so, one push after the other; None where that is not possible."""
    moves: list[str] = []
    for push in pushes:
        walk = _walk(floor, position, step(box, OPPOSITE[push])) if box in position.boxes else None
        after = None if walk is None else moved(floor, Position(step(box, OPPOSITE[push]), position.boxes), push)
        if walk is None or after is None:
            return None
        position, box = after, step(box, push)
        moves += [*walk, push]
    return moves


def best_push(floor: Floor, position: Position) -> tuple[Cell, str]:
    """The next push on a shortest solution: the box, and the way it goes."""
    while True:
        near = distance(floor, position)
        for move in MOVES:
            after = moved(floor, position, move)
            left = None if after is None else distance(floor, after)
            if after is not None and near is not None and left is not None and left < near:
                break
        else:
            raise ValueError("nothing solves the level from here, or it is solved")
        if after.boxes != position.boxes:
            return after.player, move
        position = after


def plan_in(message: str) -> tuple[Cell, list[str]] | None:
    """The box and its pushes that the planner's last line names, as in `3,2 right right`; None for anything else."""
    cell, *pushes = _last_line(message).split() or [""]
    x, comma, y = cell.partition(",")
    if not (comma and x.isascii() and y.isascii() and x.isdigit() and y.isdigit()):
        return None
    return ((int(x), int(y)), pushes) if _are_moves(pushes, MAX_PUSHES) else None


def moves_in(message: str) -> list[str] | None:
    """The moves that the executor's last line consists of; None for anything else."""
    words = _last_line(message).split()
    return words if _are_moves(words, MAX_MOVES) else None


def planner_sees(floor: Floor, position: Position) -> str:
    """Boxes, goals and walls, and not the player."""
    return f"boxes {_named(position.boxes)}\ngoals {_named(floor.goals)}\n{_walls(floor)}"


def executor_sees(floor: Floor, position: Position, said: str) -> str:
    """The player, boxes and walls, and what the planner said; not the goals."""
    player = _named([position.player])
    return f"player {player}\nboxes {_named(position.boxes)}\n{_walls(floor)}\nsaid {said}"


def agent_sees(floor: Floor, position: Position) -> str:
    """Everything: what a single agent is asked with."""
    return f"player {_named([position.player])}\n{planner_sees(floor, position)}"


OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def _last_line(message: str) -> str:
    return message.strip().rpartition("\n")[2]


def _are_moves(words: Sequence[str], most: int) -> bool:
    return 1 <= len(words) <= most and all(word in MOVES for word in words)


def _named(cells: Sequence[Cell] | frozenset[Cell]) -> str:
    return " ".join(f"{x},{y}" for x, y in sorted(cells))


def _walls(floor: Floor) -> str:
    """The size of the level, and the walls that are not its border."""
    width, height = (1 + max(cell[axis] for cell in floor.walls) for axis in (0, 1))
    inner = [(x, y) for x, y in floor.walls if 0 < x < width - 1 and 0 < y < height - 1]
    return f"size {width},{height}\nwalls {_named(inner)}".rstrip()


def _within(blocked: frozenset[Cell], start: Cell, limit: int) -> Iterator[Cell]:
    """Cells that are reached from a cell, itself first; at most one more than `limit`."""
    seen, queue = {start}, deque([start])
    while queue and len(seen) <= limit:
        cell = queue.popleft()
        yield cell
        new = {step(cell, move) for move in MOVES} - blocked - seen
        seen |= new
        queue.extend(sorted(new))
    yield from queue


def _walk(floor: Floor, position: Position, to: Cell) -> list[str] | None:
    """The shortest way of the player without a push."""
    blocked = floor.walls | position.boxes
    ways: dict[Cell, list[str]] = {position.player: []}
    queue = deque([position.player])
    while queue and to not in ways:
        cell = queue.popleft()
        for move in MOVES:
            target = step(cell, move)
            if target not in blocked and target not in ways:
                ways[target] = [*ways[cell], move]
                queue.append(target)
    return ways.get(to)


@lru_cache(maxsize=512)
def _distances(floor: Floor) -> dict[Position, int]:
    """Moves to a solution from each position that has one: breadth first from the solved ones, each move undone."""
    ends = [Position(player, floor.goals) for player in floor.cells - floor.goals]
    found = dict.fromkeys(ends, 0)
    queue = deque(ends)
    while queue:
        position = queue.popleft()
        for before in _before(floor, position):
            if before not in found:
                found[before] = found[position] + 1
                queue.append(before)
    return found


def _before(floor: Floor, position: Position) -> Iterator[Position]:
    """Positions from which one move leads here."""
    for move in MOVES:
        player = step(position.player, OPPOSITE[move])
        if player not in floor.cells or player in position.boxes:
            continue
        yield Position(player, position.boxes)
        pushed = step(position.player, move)
        if pushed in position.boxes:
            yield Position(player, position.boxes - {pushed} | {position.player})
