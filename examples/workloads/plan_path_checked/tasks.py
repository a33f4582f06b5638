"""Boards of Plan-Path by seed, each with a goal that can be reached and the length of its shortest path.

python -m examples.workloads.plan_path_checked.tasks --tasks 512 --seed 0 > tasks.jsonl
python -m examples.workloads.plan_path_checked.tasks --tasks 512 --size 5 > smaller.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator

from examples.workloads.plan_path_checked.board import Task, distance, parsed

SIZE, WALLS = 10, 0.22
"""Cells of a side, and the share of cells that are walls."""
SHORTEST = 3
"""Moves that a task's shortest path has at least."""
TRIES = 1000


def make_tasks(count: int, seed: int, *, size: int = SIZE, walls: float = WALLS) -> Iterator[Task]:
    """`count` boards with ids, the same for the same seed and settings; other seeds give held-out ones.

    Raises ValueError for a size or a share of walls that there are no boards for.
    """
    if not (3 <= size <= 100 and 0 <= walls <= 0.5):
        raise ValueError("allowed are a size of 3 to 100 and a share of walls from 0 to 0.5")
    rng = random.Random(f"plan-path {seed} {size} {walls}")
    for number in range(count):
        yield _make_task(rng, f"{seed}-{number}", size, walls)


def _make_task(rng: random.Random, name: str, size: int, walls: float) -> Task:
    cells = [(x, y) for x in range(size) for y in range(size)]
    for _ in range(TRIES):
        blocked = {cell for cell in cells if rng.random() < walls}
        if len(blocked) > len(cells) - 2:
            continue
        start, goal = rng.sample([cell for cell in cells if cell not in blocked], 2)
        marks = {**dict.fromkeys(blocked, "#"), start: "S", goal: "G"}
        rows = ["".join(marks.get((x, y), ".") for x in range(size)) for y in range(size)]
        shortest = distance(*parsed(rows))
        if shortest is not None and shortest >= SHORTEST:
            return {"id": name, "rows": rows, "shortest": shortest}
    raise ValueError(f"no board in {TRIES} of size {size} with {walls:g} walls has a goal {SHORTEST} moves away")


def main() -> None:
    """Print boards, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=SIZE, help="cells of a side (default: %(default)s)")
    parser.add_argument("--walls", type=float, default=WALLS, help="share of the cells (default: %(default)s)")
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed, size=options.size, walls=options.walls):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
