"""Tasks by seed: three operations on a digit. Prints tasks, one line of JSON each.

python -m examples.designed_team.tasks --tasks 400 --executions 4
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

SIZE = 10
"""Numbers are 0 to 9, and operations count modulo 10."""
OPERATIONS: Mapping[str, Callable[[int], int]] = {
    "increment": lambda number: number + 1,
    "jump": lambda number: number + 3,
    "mirror": lambda number: SIZE - 1 - number,
    "double": lambda number: 2 * number,
}
OPERATIONS_OF_A_TASK = 3
Team = Literal["designed", "one agent", "an agent each"]
"""Who does the work: a team that the designer writes, a fixed agent alone, or a fixed agent for each operation."""


class Task(TypedDict):
    """`executions` is the number of times that a design is carried out."""

    id: str
    operations: list[str]
    number: str
    answer: str
    executions: int
    team: Team


def apply(operations: Sequence[str], number: str) -> str:
    """The number after all operations, in order."""
    value = int(number)
    for operation in operations:
        value = OPERATIONS[operation](value) % SIZE
    return str(value)


def make_tasks(count: int, seed: int, executions: int = 1, team: Team = "designed") -> list[Task]:
    """Return `count` tasks for a team. Operations and digits are always the same for a seed."""
    rng = random.Random(f"designed team {seed}")
    tasks: list[Task] = []
    for place in range(count):
        operations = rng.choices(sorted(OPERATIONS), k=OPERATIONS_OF_A_TASK)
        number = str(rng.randrange(SIZE))
        tasks.append(
            {
                "id": f"{team} {seed}-{place}",
                "operations": operations,
                "number": number,
                "answer": apply(operations, number),
                "executions": executions,
                "team": team,
            }
        )
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--executions", type=int, default=1, help="of each design (default: %(default)s)")
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed, options.executions):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
