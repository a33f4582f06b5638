"""Builds the base model of the games: a small Qwen3 that knows their words and, mostly, the rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from examples.tiny_model import SPECIAL, Demonstration, build_base
from examples.workloads.self_play import duel, noughts
from examples.workloads.self_play.turns import with_rules

WORDS = (
    *("user", "assistant", "row", "column", "choose", *duel.CHOICES, "x", "o"),
    *(str(cell + 1) for cell in noughts.CELLS),
    *(f"{cell + 1}={mark}" for cell in noughts.CELLS for mark in ".xo"),
)
"""The players' language: a token each, after the special ones. It has no words for rules."""
LEFT = {"row": 0.85, "column": 0.15}
"""How often the base chooses left: far from the equilibrium."""
MOVES, CHOICES = 6000, 400
ILLEGAL = 0.05
"""Share of the moves on the board that name any cell."""


def choices_only() -> dict[str, int]:
    """A `logit_bias` that leaves nothing but the choices of the matrix game."""
    return {str(len(SPECIAL) + WORDS.index(word)): 50 for word in duel.CHOICES}


def demonstrations(rng: random.Random, moves: int = MOVES) -> Iterator[Demonstration]:
    """Choices by `LEFT`, and moves to a random cell of random positions, which is seldom not free."""
    for i in range(CHOICES):
        seat = ("row", "column")[i % 2]
        yield duel.messages({}, [], seat), duel.CHOICES[0 if rng.random() < LEFT[seat] else 1]
    for _ in range(moves):
        board = noughts.EMPTY
        for number in range(rng.randrange(9)):
            board = noughts.placed(board, rng.choice(noughts.free(board)), "xo"[number % 2])
        seat = "xo"[(9 - len(noughts.free(board))) % 2]
        cell = rng.choice(list(noughts.CELLS) if rng.random() < ILLEGAL else noughts.free(board))
        yield with_rules({}, noughts.board_seen(board, seat)), str(cell + 1)


def build(folder: Path, *, seed: int = 0, steps: int = 400, moves: int = MOVES) -> Path:
    """Build, warm up and save the base as a Hugging Face folder; the same for the same seed. Without `moves` on the
    board it knows the matrix game alone."""
    rng = random.Random(f"games {seed}")
    shown = list(demonstrations(rng, moves))
    build_base(folder, WORDS, shown, rng, seed=seed, steps=steps, batch=64)
    return folder
