"""Boards of Sudoku: their rules, and cells and fills as the roles write them. Rows and columns count from 1.

A board is a list of rows, 0 where a cell is empty; its boxes are squares: 2 x 2 on 4 x 4, 3 x 3 on 9 x 9.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence

from examples.workloads.code.programs import program_in, run, sandbox

Board = list[list[int]]
Cell = tuple[int, int]
"""Row and column, from 0."""
Fill = tuple[Cell, int]
_CELL = re.compile(r"r(\d{1,2})c(\d{1,2})", re.ASCII)
_FILL = re.compile(r"r(\d{1,2})c(\d{1,2})=(\d{1,2})", re.ASCII)


def name(cell: Cell) -> str:
    """How the roles write a cell: r1c2."""
    return f"r{cell[0] + 1}c{cell[1] + 1}"


def text_of(board: Board) -> str:
    """A line for each row, with a dot for an empty cell."""
    return "\n".join(" ".join(str(value) if value else "." for value in row) for row in board)


def cells(size: int) -> Iterator[Cell]:
    """All cells of a board."""
    return ((row, column) for row in range(size) for column in range(size))


@functools.cache
def units(size: int) -> list[tuple[str, list[Cell]]]:
    """Rows, columns and boxes, each with its name and cells."""
    box = math.isqrt(size)
    rows = [(f"row {row + 1}", [(row, column) for column in range(size)]) for row in range(size)]
    columns = [(f"column {column + 1}", [(row, column) for row in range(size)]) for column in range(size)]
    corners = [(top, left) for top in range(0, size, box) for left in range(0, size, box)]
    boxes = [
        (f"the box at {name((top, left))}", [(top + r, left + c) for r in range(box) for c in range(box)])
        for top, left in corners
    ]
    return [*rows, *columns, *boxes]


def possible(board: Board, cell: Cell) -> set[int]:
    """Values that stand in no unit of an empty cell."""
    around = {board[r][c] for _, unit in units(len(board)) if cell in unit for r, c in unit if (r, c) != cell}
    return set(range(1, len(board) + 1)) - around


def forced(board: Board) -> set[Cell]:
    """Empty cells that only one value fits."""
    return {cell for cell in cells(len(board)) if not board[cell[0]][cell[1]] and len(possible(board, cell)) == 1}


def cells_in(message: str) -> list[Cell] | None:
    """The cells that a message names, `r1c2 r3c4`; None when it says anything else, or a cell twice."""
    found = [_CELL.fullmatch(word) for word in message.split()]
    named = [(int(match[1]) - 1, int(match[2]) - 1) for match in found if match]
    return named if found and len(set(named)) == len(found) else None


def fills_in(message: str) -> list[Fill] | None:
    """The fills that a message holds, `r1c2=3 r3c4=1`; None when it says anything else, or fills a cell twice."""
    found = [_FILL.fullmatch(word) for word in message.split()]
    fills = [((int(match[1]) - 1, int(match[2]) - 1), int(match[3])) for match in found if match]
    return fills if found and len({cell for cell, _ in fills}) == len(found) else None


def fills_of(message: str, board: Board) -> list[Fill] | None:
    """The fills of a message, or those that the program in it prints when it reads the board.

    Raises SandboxUnavailable, whatever the message, where no program could be run.
    """
    sandbox()
    program = program_in(message)
    if program is None:
        return fills_in(message)
    ran = run(program, text_of(board) + "\n")
    return fills_in(ran.stdout) if ran.ok and not ran.cut else None


def refusal(puzzle: Board, board: Board, fill: Fill) -> str:
    """Why a fill is not allowed, by name; empty if it is. A value that was filled in before may be replaced."""
    (row, column), value = fill
    size, shown = len(puzzle), f"{name(fill[0])}={value}"
    if not (0 <= row < size and 0 <= column < size):
        return f"{shown}: there is no such cell"
    if not 1 <= value <= size:
        return f"{shown}: values are 1 to {size}"
    if puzzle[row][column]:
        return f"{shown}: the cell is a clue"
    for unit, members in units(size):
        if (row, column) in members and any(board[r][c] == value for r, c in members if (r, c) != (row, column)):
            return f"{shown}: {value} is in {unit} already"
    return ""


def filled(puzzle: Board, board: Board, fills: Sequence[Fill]) -> tuple[Board, list[str]]:
    """A new board with the fills that are allowed, one after the other, and why the others are not."""
    after, refused = [list(row) for row in board], []
    for fill in fills:
        if why := refusal(puzzle, after, fill):
            refused.append(why)
        else:
            (row, column), value = fill
            after[row][column] = value
    return after, refused
