"""Builds the demo's base model: a small Qwen3 with its own tokenizer, warmed up on imperfect demonstrations.

Pretrained weights would do as well; this takes about a minute and needs no download. The demonstrators know the format
and the game, but err often, so that the base succeeds at about one task in seven and nothing is out of its reach.

    python -m examples.plan_path.base --out runs/demo/base --seed 0
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from examples.plan_path.grid import (
    DRIVER,
    LETTERS,
    MOVES,
    NAVIGATOR,
    NEARBY,
    SIZE,
    Cell,
    Grid,
    carry_out,
    cell_of,
    driver_messages,
    grid_of,
    make_task,
    navigator_messages,
    step,
)
from examples.tiny_model import Demonstration, build_base, build_by_command

STEPS = 260
BATCH = 96
LR = 3e-3
DEMONSTRATIONS = 9000
"""Made once; each is seen about three times."""

ERRING_MOVE = 0.42
"""Share of the navigator's moves that are random."""
USUAL_TABLE = 0.4
"""Share of the driver's answers that ignore the table and use the usual controls: a up, b right, c down, d left."""
ERRING_CONTROL = 0.1
BAD_FORMAT = 0.12
"""Share of answers that neither role may give: too long, or in the other role's words."""

Demonstrator = Callable[[random.Random], Demonstration]
WORDS = (
    *(*MOVES, *LETTERS, *NEARBY, "goal", "walls", "controls", "said", "go", "press", "system", "user", "assistant"),
    *(f"{move}={n}" for move in MOVES for n in range(SIZE)),
    *(f"{move}={letter}" for move in MOVES for letter in LETTERS),
    *f"{NAVIGATOR} {DRIVER}".split(),
)
"""The words of the game, a token each."""


def scene(rng: random.Random, size: int = SIZE) -> tuple[Grid, Cell]:
    """A random task, some random moves into it."""
    task = make_task(rng, size=size)
    grid, at = grid_of(task), cell_of(task["start"])
    walked = carry_out(grid, at, rng.choices(list(MOVES), k=rng.randrange(6)))
    return grid, at if walked.reached else walked.at


def navigator_demonstration(rng: random.Random) -> Demonstration:
    """Shortest paths, with random moves in between."""
    grid, at = scene(rng)
    return navigator_messages(grid, at), spoil(rng, erring_moves(rng, grid, at))


def driver_demonstration(rng: random.Random) -> Demonstration:
    """Controls by the table, or by the table that the demonstrator is used to."""
    controls = zip(MOVES, rng.sample(LETTERS, len(LETTERS)), strict=True)
    grid = Grid(SIZE, frozenset(), (0, 0), tuple(controls))
    moves = rng.choices(list(MOVES), k=rng.choice((1, 2)))
    return driver_messages(grid, spoil(rng, moves)), spoil(rng, erring_controls(rng, grid, moves))


def erring_moves(rng: random.Random, grid: Grid, at: Cell) -> list[str]:
    """One or two moves on a shortest path, or random ones."""
    moves: list[str] = []
    for _ in range(rng.choice((1, 2))):
        if at == grid.goal:
            break
        move = rng.choice(list(MOVES))
        if rng.random() >= ERRING_MOVE:
            move = min(rng.sample(list(MOVES), 4), key=lambda m: _distance(grid, step(at, m)))
        moves.append(move)
        at = carry_out(grid, at, [move]).at
    return moves


def erring_controls(rng: random.Random, grid: Grid, moves: Sequence[str], *, usual: bool = False) -> list[str]:
    """The controls for some moves, with errors; `usual` presses by the usual table in any case."""
    usual = usual or rng.random() < USUAL_TABLE
    controls = dict(zip(MOVES, LETTERS, strict=True)) if usual else dict(grid.controls)
    return [rng.choice(LETTERS) if rng.random() < ERRING_CONTROL else controls[move] for move in moves]


def spoil(rng: random.Random, words: Sequence[str]) -> str:
    """Break the format now and then."""
    if rng.random() >= BAD_FORMAT:
        return " ".join(words)
    return " ".join(rng.choices([*MOVES, *LETTERS, "go", "press"], k=rng.randrange(1, 5)))


def _distance(grid: Grid, cell: Cell) -> float:
    return grid.distance(cell) if grid.free(cell) else math.inf


TEAM: tuple[Demonstrator, ...] = (navigator_demonstration, driver_demonstration, driver_demonstration)
"""The driver has more to learn: to look a move up in a table."""


def build(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    demonstrators: Sequence[Demonstrator] = TEAM,
    count: int = DEMONSTRATIONS,
    words: Iterable[str] = (),
    report: Callable[[int, float], None] = lambda step, loss: None,
    **size: int,
) -> None:
    """Build, warm up and save a base model as a Hugging Face folder; the same for the same seed. `words` are those that
    the demonstrations hold beyond the game's own; `size` as in `build_model`."""
    rng = random.Random(f"demonstrations {seed}")
    shown = [demonstrators[i % len(demonstrators)](rng) for i in range(count)]
    build_base(folder, [*WORDS, *words], shown, rng, seed=seed, steps=steps, batch=BATCH, lr=LR, report=report, **size)


if __name__ == "__main__":
    build_by_command(build, STEPS)
