"""When a Sudoku is solved, and what messages of the roles are worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from examples.workloads.sudoku.board import Board, Fill, cells, cells_in, filled, forced, name, units

CELLS = 4
"""Most cells that a planner may name at once."""
BAD_FORMAT = -1.0


class Puzzle(TypedDict):
    """A task: the clues, and the one way to fill the rest."""

    id: str
    puzzle: Board
    solution: Board


def faults(puzzle: Board, board: Board) -> list[str]:
    """All that keeps a board from being a solution of the puzzle: clues that were changed, cells that are empty or out
    of range, values that stand twice in a row, column or box. A board of another shape has that one fault."""
    size = len(puzzle)
    if len(board) != size or any(len(row) != size for row in board):
        return [f"the board is not {size} x {size}"]
    found = []
    for row, column in cells(size):
        value, clue = board[row][column], puzzle[row][column]
        if clue and value != clue:
            found.append(f"{name((row, column))}: the clue {clue} was changed to {value}")
        elif value == 0:
            found.append(f"{name((row, column))}: empty")
        elif value not in range(1, size + 1):
            found.append(f"{name((row, column))}: {value} is not 1 to {size}")
    for unit, members in units(size):
        counts = Counter(board[row][column] for row, column in members)
        found += [f"{unit}: {value} stands {count} times" for value, count in counts.items() if value and count > 1]
    return found


def solved(puzzle: Board, board: Board) -> bool:
    """Whether a board is the solution of the puzzle: a full board is not enough, nor one that breaks no rule."""
    return not faults(puzzle, board)


def planner_reward(message: str, board: Board, task: Puzzle) -> dict[str, float]:
    """The cells that the planner names, as if the forced ones were filled rightly: `team` is 1 if that solves the
    puzzle; `local` the forced cells among them less the others, by how many could be named."""
    named = cells_in(message)
    if named is None or len(named) > CELLS:
        return {"team": 0.0, "local": BAD_FORMAT}
    fitting = forced(board)
    right = [cell for cell in named if cell in fitting]
    after, _ = filled(task["puzzle"], board, [((r, c), task["solution"][r][c]) for r, c in right])
    local = (2 * len(right) - len(named)) / max(1, min(CELLS, len(fitting)))
    return {"team": float(solved(task["puzzle"], after)), "local": max(BAD_FORMAT, local)}


def filler_reward(fills: Sequence[Fill] | None, board: Board, task: Puzzle) -> dict[str, float]:
    """The fills of a message, None if none were read: `team` is 1 if they solve the puzzle; `local` the cells that
    become right less those that are refused or become wrong, by the cells that were not right before."""
    if fills is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    after, refused = filled(task["puzzle"], board, fills)
    triples = [(board[r][c], after[r][c], task["solution"][r][c]) for r, c in cells(len(board))]
    missing = sum(old != right for old, _, right in triples)
    gained = sum((new == right) - (old == right) for old, new, right in triples)
    wrong = sum(new not in (old, right) for old, new, right in triples)
    local = (gained - wrong - len(refused)) / max(1, missing)
    return {"team": float(solved(task["puzzle"], after)), "local": max(BAD_FORMAT, local)}
