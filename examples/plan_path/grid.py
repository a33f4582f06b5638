"""The grid world: its rules, the view of each role as text, and the tasks.

Cells are (x, y) with x to the right and y up. A task is plain JSON: `size`, `walls`, `start`, `goal`, and
`controls`, the letter that each move answers to, which differs from task to task.

    python -m examples.plan_path.grid --tasks 512 --seed 0 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict

Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"up": (0, 1), "right": (1, 0), "down": (0, -1), "left": (-1, 0)}
LETTERS = ("a", "b", "c", "d")
NEARBY: dict[str, Cell] = MOVES | {
    "up-up": (0, 2),
    "up-right": (1, 1),
    "right-right": (2, 0),
    "down-right": (1, -1),
    "down-down": (0, -2),
    "down-left": (-1, -1),
    "left-left": (-2, 0),
    "up-left": (-1, 1),
}
"""Cells that the navigator can see, by name."""
ROUNDS = 5
"""Turns that each role has to reach the goal."""
SIZE = 6

NAVIGATOR = "You navigate."
DRIVER = "You drive."


class Board(TypedDict):
    """A task: walls and cells are [x, y], `controls` has the letter of each move."""

    id: str
    size: int
    walls: list[list[int]]
    start: list[int]
    goal: list[int]
    controls: dict[str, str]


@dataclass(frozen=True)
class Grid:
    """One board with its goal and its control table (letter by move)."""

    size: int
    walls: frozenset[Cell]
    goal: Cell
    controls: tuple[tuple[str, str], ...]

    def free(self, cell: Cell) -> bool:
        """Whether the agent can stand on `cell`."""
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size and cell not in self.walls

    def distance(self, cell: Cell) -> int:
        """Moves on the shortest path from `cell` to the goal."""
        return _distances(self)[cell]


@dataclass(frozen=True)
class Effect:
    """The effect of a sequence of moves: its last cell, moves nearer to the goal, bumps into walls, goal reached."""

    at: Cell
    progress: int
    bumps: int
    reached: bool


def grid_of(task: Board) -> Grid:
    """The board of a task."""
    walls = frozenset((x, y) for x, y in task["walls"])
    return Grid(task["size"], walls, cell_of(task["goal"]), tuple(task["controls"].items()))


def cell_of(pair: Sequence[int]) -> Cell:
    """A cell from its JSON form."""
    return (pair[0], pair[1])


def step(cell: Cell, move: str) -> Cell:
    """The cell one move away."""
    dx, dy = MOVES[move]
    return (cell[0] + dx, cell[1] + dy)


def carry_out(grid: Grid, at: Cell, moves: Sequence[str]) -> Effect:
    """Carry out moves from `at`: a wall costs the move, the goal ends them."""
    before, bumps = grid.distance(at), 0
    for move in moves:
        if at == grid.goal:
            break
        target = step(at, move)
        if grid.free(target):
            at = target
        else:
            bumps += 1
    return Effect(at, before - grid.distance(at), bumps, at == grid.goal)


def moves_in(message: str) -> list[str] | None:
    """The one or two moves that a message says; None when it says anything else."""
    words = message.split()
    return words if 1 <= len(words) <= 2 and all(word in MOVES for word in words) else None


def moves_of(grid: Grid, message: str) -> list[str] | None:
    """The moves that the one or two controls in a message stand for; None when it is anything else."""
    by_letter = {letter: move for move, letter in grid.controls}
    words = message.split()
    return [by_letter[w] for w in words] if 1 <= len(words) <= 2 and all(w in by_letter for w in words) else None


def view(grid: Grid, at: Cell) -> str:
    """The view of the navigator: the way to the goal relative to `at`, and the walls within two moves."""
    dx, dy = grid.goal[0] - at[0], grid.goal[1] - at[1]
    way = f"{'right' if dx >= 0 else 'left'}={abs(dx)} {'up' if dy >= 0 else 'down'}={abs(dy)}"
    walls = [name for name, (x, y) in NEARBY.items() if not grid.free((at[0] + x, at[1] + y))]
    return f"goal {way}\nwalls {' '.join(walls)}"


def table(grid: Grid) -> str:
    """The view of the driver: the control of each move."""
    return " ".join(f"{move}={letter}" for move, letter in grid.controls)


def navigator_messages(grid: Grid, at: Cell) -> list[dict[str, str]]:
    """The navigator's prompt."""
    return [{"role": "system", "content": NAVIGATOR}, {"role": "user", "content": view(grid, at)}]


def driver_messages(grid: Grid, message: str) -> list[dict[str, str]]:
    """The driver's prompt: its control table and the navigator's message."""
    content = f"controls {table(grid)}\nsaid {message}"
    return [{"role": "system", "content": DRIVER}, {"role": "user", "content": content}]


def make_task(rng: random.Random, name: str = "", size: int = SIZE) -> Board:
    """A random task whose goal can be reached: a wall on each sixth cell, and half of `size` to `size` moves to go."""
    cells = [(x, y) for x in range(size) for y in range(size)]
    letters = list(LETTERS)
    while True:
        *walls, start, goal = rng.sample(cells, len(cells) // 6 + 2)
        rng.shuffle(letters)
        task: Board = {
            "id": name,
            "size": size,
            "walls": [list(wall) for wall in walls],
            "start": list(start),
            "goal": list(goal),
            "controls": dict(zip(MOVES, letters, strict=True)),
        }
        if size // 2 <= _distances(grid_of(task)).get(start, 0) <= size:
            return task


def make_tasks(count: int, seed: int, size: int = SIZE) -> Iterator[Board]:
    """`count` tasks with ids, the same for the same seed; other seeds give held-out tasks."""
    rng = random.Random(f"plan_path {seed}")
    for number in range(count):
        yield make_task(rng, f"{seed}-{number}", size)


@lru_cache(maxsize=8192)
def _distances(grid: Grid) -> dict[Cell, int]:
    """The number of moves from each cell to the goal."""
    distances = {grid.goal: 0}
    queue = deque([grid.goal])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            target = step(cell, move)
            if target not in distances and grid.free(target):
                distances[target] = distances[cell] + 1
                queue.append(target)
    return distances


def main() -> None:
    """Print tasks, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
