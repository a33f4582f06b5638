"""Grids by seed, by Plan-Path's rules; `--pictures` draws each as a PNG, as the application does.

python -m examples.workloads.pictures.tasks --tasks 512 --seed 0 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.plan_path.grid import SIZE, Board, cell_of, grid_of
from examples.plan_path.grid import make_tasks as boards
from examples.workloads.pictures.board import drawn


def make_tasks(count: int, seed: int = 0, *, size: int = SIZE) -> list[Board]:
    """`count` grids of `size` by `size` whose goal can be reached, the same for the same seed; other seeds
    give others. Raises ValueError for a size below 2."""
    if size < 2:
        raise ValueError(f"size is {size}; grids have at least 2 cells a side")
    return list(boards(count, seed, size))


def main() -> None:
    """Print grids, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=Path, help="folder to draw them in, each with the agent at its start")
    parser.add_argument("--size", type=int, default=SIZE, help="cells of a side (default: %(default)s)")
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed, size=options.size):
        print(json.dumps(task))
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            (options.pictures / f"{task['id']}.png").write_bytes(drawn(grid_of(task), cell_of(task["start"])))


if __name__ == "__main__":
    main()
