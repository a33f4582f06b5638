"""A provider's model for both agents, scripted: a programmer of middling skill, and a plan agent that checks answers.

Its solved episodes are the examples that the small model is first trained on.

python -m examples.workloads.code_team.expert --port 8100
"""

from __future__ import annotations

import argparse
import json
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from examples.tool_agent.provider import serving
from examples.workloads.code_team.app import ACCEPT, ALONE, CODER, REJECT, RULES
from examples.workloads.code_team.programs import PROGRAMS
from examples.workloads.code_team.puzzles import Kind, answer_in, carry_out, is_solved
from examples.workloads.plan_path_checked import board

SKILL = 0.45
"""Probability of a right piece, where a place of a program has wrong ones."""
CARELESS = 0.1
"""Share of decisions that are made without checking."""
OWN_MOVES = 0.3
"""Share of wrong moves that the plan agent replaces by moves of its own, instead of rejecting them."""
MOST_OWN_MOVES = 3


def next_message(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The next message of a conversation; the same for the same conversation."""
    rng = random.Random(json.dumps(messages, sort_keys=True))
    system, user = str(messages[0]["content"]), str(messages[1]["content"])
    kind = next(kind for kind, rules in RULES.items() if rules in system)
    if CODER in system:
        return _call(write_program(rng, kind))
    rows = user.removeprefix("Puzzle:\n").partition("\nProgram:")[0].split("\n")
    if ALONE in system:
        return _say(own_answer(rng, kind, rows))
    return _say(decide(rng, kind, rows, user.rpartition("Output:")[2]))


def write_program(rng: random.Random, kind: Kind) -> str:
    """A program with a wrong piece here and there."""
    written: list[str] = []
    for choice in PROGRAMS[kind]:
        is_right = not choice.wrong or rng.random() < SKILL
        written.append(rng.choice(choice.right if is_right else choice.wrong))
    return "".join(written)


def decide(rng: random.Random, kind: Kind, rows: Sequence[str], output: str) -> str:
    """Accept an output that solves the puzzle; otherwise reject it, or replace its moves."""
    answer = answer_in(kind, output, len(rows))
    if answer is not None and (rng.random() < CARELESS or is_solved(kind, carry_out(kind, rows, answer)[0])):
        return ACCEPT
    if kind == "plan_path" and rng.random() < OWN_MOVES:
        return own_answer(rng, kind, rows)
    return REJECT


def own_answer(rng: random.Random, kind: Kind, rows: Sequence[str]) -> str:
    """An answer without a program: the first moves of the shortest path, random moves, or a grid of random values."""
    if kind == "sudoku":
        values = "1234"[: len(rows)]
        return " ".join("".join(rng.choice(values) if mark == "." else mark for mark in row) for row in rows)
    if kind == "sokoban":
        return " ".join(rng.choices(list(board.MOVES), k=rng.randint(1, MOST_OWN_MOVES)))
    floor, at = board.parsed(rows)
    moves: list[str] = []
    while at != floor.goal and len(moves) < MOST_OWN_MOVES:
        distances: dict[str, int] = {}
        for move in board.MOVES:
            distance = board.distance(floor, board.step(at, move))
            if distance is not None:
                distances[move] = distance
        moves.append(min(distances, key=distances.__getitem__))
        at = board.step(at, moves[-1])
    return " ".join(moves)


def _say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(program: str) -> dict[str, Any]:
    function = {"name": "run_python", "arguments": json.dumps({"program": program})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "run", "type": "function", "function": function}],
    }


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=8100)
    with serving(parser.parse_args().port, next_message) as url:
        print(f"OPENAI_BASE_URL={url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
