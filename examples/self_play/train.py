"""Two roles of one workflow play each other: each wins what the other loses.

cotune train examples/self_play/train.py:duel --recipe spiral ...
cotune train examples/self_play/train.py:noughts --recipe marshal ...
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Mapping
from typing import Any

import openai

import cotune
from examples.self_play import games


@functools.cache
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)


async def say(role: str, messages: list[dict[str, str]], **params: Any) -> str:
    """One word of a player."""
    with cotune.role(role):
        reply = await client(os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")).chat.completions.create(
            model=role, messages=messages, max_tokens=1, **params
        )
    return (reply.choices[0].message.content or "").strip()


@cotune.workflow
async def duel(task: Mapping[str, Any]) -> dict[str, float]:
    """One game of a matrix game, whose players do not see each other's choice."""
    payoff = task.get("payoff", games.PAYOFF)
    bias = games.choices_only()
    said = {seat: await say(seat, games.payoff_messages(seat), logit_bias=bias) for seat in ("row", "column")}
    left = {seat: word == games.CHOICES[0] for seat, word in said.items()}
    won = payoff[0 if left["row"] else 1][0 if left["column"] else 1]
    return {"row": won, "column": -won, **{f"{seat}_left": float(is_left) for seat, is_left in left.items()}}


@cotune.workflow
async def noughts(task: Mapping[str, Any]) -> dict[str, float]:
    """One game of tic-tac-toe: 1 for who wins, -1 for who loses or names no free cell. Where the task names a `random`
    seat, chance plays it, and `success` says whether the other has won, or drawn as second player."""
    rng, chance = random.Random(f"{task['id']} {task.get('round', 0)}"), task.get("random")
    board, won = games.EMPTY, None
    for number in games.CELLS:
        seat, other = ("x", "o") if number % 2 == 0 else ("o", "x")
        cell = (
            rng.choice(games.free(board))
            if seat == chance
            else games.cell_in(await say(seat, games.board_messages(board, seat)))
        )
        if cell is None or cell not in games.free(board):
            won = other
            break
        board = games.placed(board, cell, seat)
        if won := games.winner(board):
            break
    outcome = {seat: 0.0 if won is None else 1.0 if seat == won else -1.0 for seat in ("x", "o")}
    if chance is None:
        return outcome
    return {**outcome, "success": float(won not in (None, chance) or (won is None and chance == "x"))}
