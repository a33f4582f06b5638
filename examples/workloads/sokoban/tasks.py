"""Levels of Sokoban, each proven to have a solution by search, with the fewest pushes that solve it.

python -m examples.workloads.sokoban.tasks --tasks 512 --seed 0 > tasks.jsonl
python -m examples.workloads.sokoban.tasks --tasks 64 --size 10 --boxes 2 --pushes 3 9 > larger.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator

from examples.workloads.sokoban.game import MOVES, Cell, Floor, Level, Position, moved, parsed, solved

SIZE, BOXES, INNER_WALLS = 6, 1, 2
PUSHES = (2, 5)
"""Fewest and most pushes of a level's shortest solution."""
MOST_BOXES = 2
"""The exact search holds every position of a level: with three boxes on 10 by 10 cells there are millions."""


def make_tasks(
    count: int, seed: int, *, size: int = SIZE, boxes: int = BOXES, pushes: tuple[int, int] = PUSHES
) -> Iterator[Level]:
    """`count` levels with ids, the same for the same seed and settings; other seeds give held-out ones.

    Raises ValueError for a size or a number of boxes that there are no levels for.
    """
    if not (5 <= size <= 10 and 1 <= boxes <= MOST_BOXES and 1 <= pushes[0] <= pushes[1]):
        raise ValueError(f"allowed are a size of 5 to 10, 1 to {MOST_BOXES} boxes, and pushes from 1 on")
    rng = random.Random(f"sokoban {seed} {size} {boxes} {pushes}")
    for number in range(count):
        yield _make_task(rng, f"{seed}-{number}", size, boxes, pushes)


def fewest_pushes(floor: Floor, position: Position) -> int | None:
    """Pushes of the solution with the fewest of them; None when there is no solution."""
    found, queue = {position: 0}, deque([position])
    while queue:
        position = queue.popleft()
        if solved(floor, position):
            return found[position]
        for move in MOVES:
            after = moved(floor, position, move)
            if after is None:
                continue
            pushes = found[position] + (after.boxes != position.boxes)
            if pushes < found.get(after, pushes + 1):
                found[after] = pushes
                (queue.append if after.boxes != position.boxes else queue.appendleft)(after)
    return None


def rows_of(size: int, walls: set[Cell], goals: set[Cell], boxes: set[Cell], player: Cell) -> list[str]:
    """A level in the usual notation."""

    def mark(cell: Cell) -> str:
        if cell in walls or not all(0 < n < size - 1 for n in cell):
            return "#"
        if cell in boxes:
            return "*" if cell in goals else "$"
        if cell == player:
            return "+" if cell in goals else "@"
        return "." if cell in goals else " "

    return ["".join(mark((x, y)) for x in range(size)) for y in range(size)]


def _make_task(rng: random.Random, name: str, size: int, boxes: int, pushes: tuple[int, int]) -> Level:
    inside = [(x, y) for x in range(1, size - 1) for y in range(1, size - 1)]
    inner_walls = INNER_WALLS * len(inside) // 16
    while True:
        picked = rng.sample(inside, inner_walls + 2 * boxes + 1)
        walls, rest = set(picked[:inner_walls]), picked[inner_walls:]
        rows = rows_of(size, walls, set(rest[:boxes]), set(rest[boxes:-1]), rest[-1])
        floor, position = parsed(rows)
        fewest = fewest_pushes(floor, position)
        if fewest is not None and pushes[0] <= fewest <= pushes[1]:
            return {"id": name, "rows": rows, "pushes": fewest}


def main() -> None:
    """Print levels, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=SIZE, help="cells of a side with the border (default: %(default)s)")
    parser.add_argument("--boxes", type=int, default=BOXES)
    parser.add_argument("--pushes", type=int, nargs=2, default=PUSHES, metavar=("FEWEST", "MOST"))
    options = parser.parse_args()
    pushes = (options.pushes[0], options.pushes[1])
    for task in make_tasks(options.tasks, options.seed, size=options.size, boxes=options.boxes, pushes=pushes):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
