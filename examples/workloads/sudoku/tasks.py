"""Sudokus by seed, each with exactly one solution, which a SAT solver (PicoSAT) has proven.

python -m examples.workloads.sudoku.tasks --tasks 512 --seed 0 > tasks.jsonl
python -m examples.workloads.sudoku.tasks --tasks 512 --size 9 --empty 45 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random

import pycosat

from examples.workloads.sudoku.board import Board, Cell, cells, units
from examples.workloads.sudoku.verifier import Puzzle

EMPTY = {4: 8, 9: 45}
"""Cells to fill, by size; fewer where no more can be taken away without a second solution."""

REPEATS = 200
"""Puzzles drawn again, one after the other, after which no more are expected."""


def make_tasks(count: int, seed: int = 0, *, size: int = 4, empty: int | None = None) -> list[Puzzle]:
    """`count` different puzzles of at most so many empty cells, the same for the same seed; other seeds give others.

    Raises ValueError for a number of empty cells that no puzzle has, or that too few have.
    """
    empty = EMPTY[size] if empty is None else empty
    if not 1 <= empty < size * size:
        raise ValueError(f"empty = {empty}, but a puzzle of {size} x {size} has 1 to {size * size - 1} cells to fill")
    rng, made, again = random.Random(f"sudoku {size} {seed}"), dict[str, Puzzle](), 0
    while len(made) < count:
        solution = full_board(rng, size)
        puzzle = emptied(rng, solution, empty)
        again = again + 1 if str(puzzle) in made else 0
        if again == REPEATS:
            raise ValueError(f"no more than about {len(made)} puzzles have {empty} empty cells: ask for fewer")
        made.setdefault(str(puzzle), {"id": f"{size}-{seed}-{len(made)}", "puzzle": puzzle, "solution": solution})
    return list(made.values())


def full_board(rng: random.Random, size: int) -> Board:
    """A random full board: a regular one, with its values, rows and columns exchanged within what the rules allow."""
    box, values = math.isqrt(size), rng.sample(range(1, size + 1), size)

    def lines() -> list[int]:
        return [band * box + line for band in rng.sample(range(box), box) for line in rng.sample(range(box), box)]

    columns = lines()
    board = [[values[(box * (row % box) + row // box + column) % size] for column in columns] for row in lines()]
    return [list(line) for line in zip(*board, strict=True)] if rng.random() < 0.5 else board


def emptied(rng: random.Random, solution: Board, empty: int) -> Board:
    """A puzzle with that one solution: cells are taken away in random order while it stays the only one."""
    puzzle, left = [list(row) for row in solution], empty
    for row, column in rng.sample(list(cells(len(solution))), len(solution) ** 2):
        if left == 0:
            break
        puzzle[row][column] = 0
        if another_solution(puzzle, solution) is None:
            left -= 1
        else:
            puzzle[row][column] = solution[row][column]
    return puzzle


def another_solution(puzzle: Board, known: Board | None = None) -> Board | None:
    """A solution of the puzzle, other than the known one; None if the solver proves that there is none."""
    size = len(puzzle)
    clues = [[_variable(size, (r, c), puzzle[r][c])] for r, c in cells(size) if puzzle[r][c]]
    other = [] if known is None else [[-_variable(size, (r, c), known[r][c]) for r, c in cells(size)]]
    found = pycosat.solve([*clues, *other, *_rules(size)])
    if found == "UNSAT":
        return None
    true, values = set(found), range(1, size + 1)
    return [[next(v for v in values if _variable(size, (r, c), v) in true) for c in range(size)] for r in range(size)]


@functools.cache
def _rules(size: int) -> list[list[int]]:
    """In every cell a value, and no value twice in a unit."""
    values = range(1, size + 1)
    clauses = [[_variable(size, cell, value) for value in values] for cell in cells(size)]
    for _, unit in units(size):
        for one, other in itertools.combinations(unit, 2):
            clauses += [[-_variable(size, one, value), -_variable(size, other, value)] for value in values]
    return clauses


def _variable(size: int, cell: Cell, value: int) -> int:
    return (cell[0] * size + cell[1]) * size + value


def main() -> None:
    """Print puzzles, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=4, choices=sorted(EMPTY))
    parser.add_argument("--empty", type=int, help="cells to fill at most (default: 8 of 16, 45 of 81)")
    options = parser.parse_args()
    try:
        tasks = make_tasks(options.tasks, options.seed, size=options.size, empty=options.empty)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for task in tasks:
        print(json.dumps(task))


if __name__ == "__main__":
    main()
