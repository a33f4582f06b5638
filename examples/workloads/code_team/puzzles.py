"""Plan-Path, Sokoban and Sudoku as rows of text: how an answer is read, and how it changes the rows.

The rules are those of the workloads `plan_path_checked`, `sokoban` and `sudoku`. An answer is a list of words: moves
for Plan-Path and Sokoban, or the rows of the full grid for Sudoku.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NotRequired, TypedDict

from examples.workloads.plan_path_checked import board
from examples.workloads.sokoban import game
from examples.workloads.sudoku import verifier as sudoku

Kind = Literal["plan_path", "sokoban", "sudoku"]
KINDS: tuple[Kind, ...] = ("plan_path", "sokoban", "sudoku")
TURNS = 4
"""Turns of a task that does not name its own number."""
MOST_MOVES = 200
"""Moves that are read from one answer, which is the published limit of a Sokoban level."""
REACHED = "*"
"""Mark of Plan-Path's goal once it has been reached."""
EMPTY = "."
"""Mark of an empty cell in Sudoku."""


class Puzzle(TypedDict):
    """A task. `solution` is the full grid of a Sudoku, which the application never sees."""

    id: str
    kind: Kind
    rows: list[str]
    turns: NotRequired[int]
    solution: NotRequired[list[str]]


def answer_in(kind: Kind, text: str, size: int) -> list[str] | None:
    """The answer on the last line of a text; None if that line is anything else. `size` counts the puzzle's rows."""
    words = text.strip().rpartition("\n")[2].split()
    if kind == "sudoku":
        is_grid = len(words) == size and all(len(word) == size and word.isdecimal() for word in words)
        return words if is_grid else None
    are_moves = 0 < len(words) <= MOST_MOVES and all(word in board.MOVES for word in words)
    return words if are_moves else None


def carry_out(kind: Kind, rows: Sequence[str], answer: Sequence[str]) -> tuple[list[str], int]:
    """Return the rows after an answer, and how much of it did nothing.

    A move into a wall does nothing, and the moves after it are still made. A grid that is not the solution changes
    nothing: the answer to a Sudoku is always the whole grid.
    """
    return _RULES[kind](list(rows), answer)


def is_solved(kind: Kind, rows: Sequence[str]) -> bool:
    """Whether rows that `carry_out` returned are a solved puzzle."""
    if kind == "plan_path":
        return any(REACHED in row for row in rows)
    if kind == "sokoban":
        return game.solved(*game.parsed(rows))
    return not any(EMPTY in row for row in rows)


def grid_of(rows: Sequence[str]) -> list[list[int]]:
    """The board of the Sudoku workload, with 0 in empty cells."""
    return [[0 if mark == EMPTY else int(mark) for mark in row] for row in rows]


def _walk(rows: list[str], answer: Sequence[str]) -> tuple[list[str], int]:
    if any(REACHED in row for row in rows):
        return rows, 0
    floor, at = board.parsed(rows)
    bumps = 0
    for move in answer:
        if at == floor.goal:
            break
        target = board.step(at, move)
        if target in floor.free:
            at = target
        else:
            bumps += 1

    cells = [["." if mark == "S" else mark for mark in row] for row in rows]
    cells[at[1]][at[0]] = REACHED if at == floor.goal else "S"
    return ["".join(row) for row in cells], bumps


def _push(rows: list[str], answer: Sequence[str]) -> tuple[list[str], int]:
    floor, position = game.parsed(rows)
    position, bumps = game.carried_out(floor, position, answer)
    cells = [[mark if mark == "#" else " " for mark in row] for row in rows]
    for x, y in floor.goals:
        cells[y][x] = "."
    for x, y in position.boxes:
        cells[y][x] = "*" if (x, y) in floor.goals else "$"
    x, y = position.player
    cells[y][x] = "+" if position.player in floor.goals else "@"
    return ["".join(row) for row in cells], bumps


def _fill(rows: list[str], answer: Sequence[str]) -> tuple[list[str], int]:
    if sudoku.solved(grid_of(rows), grid_of(answer)):
        return list(answer), 0
    return rows, 1


_RULES: dict[Kind, Callable[[list[str], Sequence[str]], tuple[list[str], int]]] = {
    "plan_path": _walk,
    "sokoban": _push,
    "sudoku": _fill,
}
