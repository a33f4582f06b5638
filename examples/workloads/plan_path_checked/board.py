"""Plan-Path: boards with walls, paths cell by cell, the exact distance, and what each role sees of it as text.

A board is rows of text: `#` wall, `.` free, `S` start, `G` goal. Cells are (x, y) from the top left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict

Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"up": (0, -1), "right": (1, 0), "down": (0, 1), "left": (-1, 0)}
TURNS = 4
"""Paths that may be tried; after them the goal is not reached."""


class Task(TypedDict):
    """A task: the rows of its board, and the moves of its shortest path."""

    id: str
    rows: list[str]
    shortest: int


@dataclass(frozen=True)
class Board:
    """What never moves: the cells that are free, and the goal among them."""

    width: int
    height: int
    free: frozenset[Cell]
    goal: Cell


@dataclass(frozen=True)
class Path:
    """Where moves lead: the cell after each, up to the goal or to what is wrong with the next one."""

    cells: tuple[Cell, ...]
    fault: str
    """`wall`, `outside`, or `back` for a cell that the path has been on; empty where nothing is wrong."""


def parsed(rows: Sequence[str]) -> tuple[Board, Cell]:
    """The board of rows, and the start.

    Raises ValueError where the rows are not of one length, hold other marks, or not one start and one goal.
    """
    if len({len(row) for row in rows}) != 1:
        raise ValueError("a board has rows of one length")
    at = {(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row)}
    starts, goals = ([cell for cell, mark in at.items() if mark == which] for which in "SG")
    if len(starts) != 1 or len(goals) != 1 or set(at.values()) - set("#.SG"):
        raise ValueError("a board has one S and one G, else # and .")
    free = frozenset(cell for cell, mark in at.items() if mark != "#")
    return Board(len(rows[0]), len(rows), free, goals[0]), starts[0]


def step(cell: Cell, move: str) -> Cell:
    """The cell one move away."""
    dx, dy = MOVES[move]
    return (cell[0] + dx, cell[1] + dy)


def traced(board: Board, at: Cell, moves: Sequence[str]) -> Path:
    """Follow moves from a cell, to which they may not come back. The goal ends a path, whatever moves come after it."""
    cells = [at]
    for move in moves:
        if cells[-1] == board.goal:
            break
        cell = step(cells[-1], move)
        if cell not in board.free or cell in cells:
            inside = 0 <= cell[0] < board.width and 0 <= cell[1] < board.height
            return Path(tuple(cells[1:]), "back" if cell in cells else "wall" if inside else "outside")
        cells.append(cell)
    return Path(tuple(cells[1:]), "")


def walked(board: Board, at: Cell, moves: Sequence[str]) -> Cell:
    """The cell after a path was walked; one with a fault is not walked at all."""
    path = traced(board, at, moves)
    return at if path.fault or not path.cells else path.cells[-1]


def distance(board: Board, cell: Cell) -> int | None:
    """Moves on the shortest path from a cell to the goal; None where there is none."""
    return _distances(board).get(cell)


def moves_in(message: str) -> list[str] | None:
    """The moves that the last line of a message consists of; None for anything else."""
    words = message.strip().rpartition("\n")[2].split()
    return words if words and all(word in MOVES for word in words) else None


def planner_sees(board: Board, at: Cell, report: str) -> str:
    """The whole board, the way to the goal as if there were no walls, and what came of the last path."""
    across, down = board.goal[0] - at[0], board.goal[1] - at[1]
    ways = (("right" if across > 0 else "left", abs(across)), ("down" if down > 0 else "up", abs(down)))
    way = " ".join(f"{move} {moves}" for move, moves in ways if moves)
    return f"{_seen(board, at)}\ngoal {_named(board.goal)} {way}\nlast {report}"


def checker_sees(board: Board, at: Cell, said: str) -> str:
    """The walls, where it is, and the path that the planner said; not the goal."""
    return f"{_seen(board, at)}\nsaid {said}"


def _seen(board: Board, at: Cell) -> str:
    walls = [(x, y) for y in range(board.height) for x in range(board.width) if (x, y) not in board.free]
    named = " ".join(map(_named, walls))
    free = " ".join(move for move in MOVES if step(at, move) in board.free)
    return f"size {_named((board.width, board.height))}\nwalls {named}".rstrip() + f"\nat {_named(at)}\nfree {free}"


def _named(cell: Cell) -> str:
    return f"{cell[0]},{cell[1]}"


@lru_cache(maxsize=4096)
def _distances(board: Board) -> dict[Cell, int]:
    found = {board.goal: 0}
    queue = deque([board.goal])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            target = step(cell, move)
            if target in board.free and target not in found:
                found[target] = found[cell] + 1
                queue.append(target)
    return found
