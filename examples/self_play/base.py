"""Builds the base model of the games: a small Qwen3 that knows their words and, mostly, the rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from examples.self_play import games
from examples.tiny_model import Demonstration, build_base

LEFT = {"row": 0.85, "column": 0.15}
"""How often the base chooses left: far from the equilibrium."""
MOVES, CHOICES = 6000, 400
ILLEGAL = 0.05
"""Share of the moves on the board that name any cell."""


def demonstrations(rng: random.Random, moves: int = MOVES) -> Iterator[Demonstration]:
    """Choices by `LEFT`, and moves to a random cell of random positions, which is seldom not free."""
    for i in range(CHOICES):
        seat = ("row", "column")[i % 2]
        yield games.payoff_messages(seat), games.CHOICES[0 if rng.random() < LEFT[seat] else 1]
    for _ in range(moves):
        board = games.EMPTY
        for number in range(rng.randrange(9)):
            board = games.placed(board, rng.choice(games.free(board)), "xo"[number % 2])
        seat = "xo"[(9 - len(games.free(board))) % 2]
        cell = rng.choice(list(games.CELLS) if rng.random() < ILLEGAL else games.free(board))
        yield games.board_messages(board, seat), str(cell + 1)


def build(folder: Path, *, seed: int = 0, steps: int = 400, moves: int = MOVES) -> Path:
    """Build, warm up and save the base as a Hugging Face folder; the same for the same seed. Without `moves` on the
    board it knows the matrix game alone."""
    rng = random.Random(f"games {seed}")
    shown = list(demonstrations(rng, moves))
    build_base(folder, games.WORDS, shown, rng, seed=seed, steps=steps, batch=64)
    return folder
