"""Puzzles of all three kinds by seed, each with a proven solution.

python -m examples.workloads.code_team.tasks --tasks 512 --seed 0 > tasks.jsonl
python -m examples.workloads.code_team.tasks --tasks 512 --kinds plan_path --size 10 > published_size.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from examples.workloads.code_team.puzzles import EMPTY, KINDS, TURNS, Kind, Puzzle
from examples.workloads.plan_path_checked import tasks as plan_path
from examples.workloads.sokoban import tasks as sokoban
from examples.workloads.sudoku import tasks as sudoku

SIZE = 6
"""Cells of a side of Plan-Path. The published size is 10."""


def make_tasks(
    count: int, seed: int = 0, *, kinds: Sequence[Kind] = KINDS, size: int = SIZE, turns: int = TURNS
) -> list[Puzzle]:
    """Return `count` puzzles, the kinds in rotation. The same seed gives the same puzzles, another seed others."""
    each = -(-count // len(kinds))  # rounded up
    puzzles: dict[Kind, list[Puzzle]] = {}
    for kind in kinds:
        puzzles[kind] = _puzzles_of(kind, each, seed, size)
    rotation = [puzzles[kinds[number % len(kinds)]][number // len(kinds)] for number in range(count)]
    return [{**puzzle, "turns": turns} for puzzle in rotation]


def _puzzles_of(kind: Kind, count: int, seed: int, size: int) -> list[Puzzle]:
    if kind == "plan_path":
        boards = plan_path.make_tasks(count, seed, size=size)
        return [{"id": f"plan_path-{task['id']}", "kind": kind, "rows": task["rows"]} for task in boards]
    if kind == "sokoban":
        levels = sokoban.make_tasks(count, seed)
        return [{"id": f"sokoban-{task['id']}", "kind": kind, "rows": task["rows"]} for task in levels]
    puzzles: list[Puzzle] = []
    for task in sudoku.make_tasks(count, seed):
        clues, solution = _rows(task["puzzle"]), _rows(task["solution"])
        puzzles.append({"id": f"sudoku-{task['id']}", "kind": kind, "rows": clues, "solution": solution})
    return puzzles


def _rows(grid: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(str(value or EMPTY) for value in row) for row in grid]


def main() -> None:
    """Print puzzles, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--size", type=int, default=SIZE, help="cells of a side of Plan-Path (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of a task (default: %(default)s)")
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed, kinds=options.kinds, size=options.size, turns=options.turns):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
