"""Builds a base model that knows the words and, mostly, the rules of Sokoban: warmed up on imperfect demonstrations.

python -m examples.workloads.sokoban.base --out runs/sokoban/base --seed 0
"""

from __future__ import annotations

import random

from examples.tiny_model import Demonstration, base_builder, build_by_command
from examples.workloads.sokoban.game import (
    ALONE,
    EXECUTOR,
    MOVES,
    PLANNER,
    Floor,
    Position,
    agent_sees,
    best_push,
    carried_out,
    deadlocked,
    executor_sees,
    parsed,
    planner_sees,
    solved,
    way_to_push,
)
from examples.workloads.sokoban.tasks import SIZE, make_tasks

STEPS, DEMONSTRATIONS, LEVELS = 900, 24000, 1500
ERRING_PUSH, ERRING_MOVE = 0.4, 0.12
"""Share of the planner's pushes, and of the executor's moves, that are random."""
BAD_FORMAT = 0.05
"""Share of answers that neither role may give."""
CELLS = [f"{x},{y}" for x in range(SIZE + 1) for y in range(SIZE + 1)]
WORDS = (
    *("system", "user", "assistant", *MOVES, "player", "boxes", "goals", "walls", "size", "said", *CELLS),
    *f"{PLANNER} {EXECUTOR} {ALONE}".split(),
)
"""The words of the game, a token each."""


def scene(rng: random.Random, levels: list[tuple[Floor, Position]]) -> tuple[Floor, Position]:
    """A level some random moves after its start, neither solved nor beyond it."""
    while True:
        floor, start = rng.choice(levels)
        position, _ = carried_out(floor, start, rng.choices(list(MOVES), k=rng.randrange(12)))
        if not (solved(floor, position) or deadlocked(floor, position)):
            return floor, position


def planner_demonstration(rng: random.Random, floor: Floor, position: Position) -> Demonstration:
    """The next push or two of a shortest solution, or a random one."""
    (x, y), push = best_push(floor, position)
    if rng.random() < ERRING_PUSH:
        push = rng.choice(list(MOVES))
    pushes = [push] * rng.choice((1, 1, 2))
    return _messages(PLANNER, planner_sees(floor, position)), spoiled(rng, f"{x},{y} {' '.join(pushes)}")


def executor_demonstration(rng: random.Random, floor: Floor, position: Position) -> Demonstration:
    """The shortest way to push as said, with random moves in between."""
    moves, said = None, ""
    while moves is None:
        (x, y), pushes = rng.choice(sorted(position.boxes)), [rng.choice(list(MOVES))] * rng.choice((1, 1, 2))
        moves, said = way_to_push(floor, position, (x, y), pushes), f"{x},{y} {' '.join(pushes)}"
    return _messages(EXECUTOR, executor_sees(floor, position, said)), spoiled(rng, erring(rng, moves))


def agent_demonstration(rng: random.Random, floor: Floor, position: Position) -> Demonstration:
    """The shortest way to the next push of a shortest solution, or to a random one, with random moves in between."""
    box, push = best_push(floor, position)
    pushes = [push, *MOVES] if rng.random() >= ERRING_PUSH else rng.sample(list(MOVES), len(MOVES))
    moves = next(way for p in [*pushes, push] if (way := way_to_push(floor, position, box, [p])) is not None)
    return _messages(ALONE, agent_sees(floor, position)), spoiled(rng, erring(rng, moves))


def erring(rng: random.Random, moves: list[str]) -> str:
    """Moves, some of them random."""
    return " ".join(rng.choice(list(MOVES)) if rng.random() < ERRING_MOVE else move for move in moves)


def spoiled(rng: random.Random, answer: str) -> str:
    """Break the format now and then."""
    if rng.random() >= BAD_FORMAT:
        return answer
    return " ".join(rng.choices([*MOVES, *CELLS], k=rng.randrange(1, 5)))


def _messages(system: str, seen: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": seen}]


def demonstrations(rng: random.Random, seed: int, count: int) -> list[Demonstration]:
    """Demonstrations of all roles in turn, on tasks of the seed."""
    levels = [parsed(task["rows"]) for task in make_tasks(min(LEVELS, count), seed + 1000)]
    roles = (planner_demonstration, executor_demonstration, executor_demonstration, agent_demonstration)
    return [roles[i % len(roles)](rng, *scene(rng, levels)) for i in range(count)]


build = base_builder(lambda: WORDS, demonstrations, name="sokoban", steps=STEPS, count=DEMONSTRATIONS)

if __name__ == "__main__":
    build_by_command(build, STEPS)
