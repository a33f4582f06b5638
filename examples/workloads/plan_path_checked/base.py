"""Builds a base model for boards of 5 by 5 that knows the words of the prompts that CrewAI makes and, mostly, what each
role is for: warmed up on imperfect demonstrations.

python -m examples.workloads.plan_path_checked.base --out runs/plan_path_checked/base --seed 0
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from crewai import BaseLLM
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import SPECIAL, TEMPLATE, Demonstration, base_builder, build_by_command
from examples.workloads.plan_path_checked.app import MEMBERS, WalkTool, member
from examples.workloads.plan_path_checked.board import (
    MOVES,
    Board,
    Cell,
    checker_sees,
    distance,
    parsed,
    planner_sees,
    step,
    traced,
    walked,
)
from examples.workloads.plan_path_checked.tasks import make_tasks

SIZE = 5
"""Of the boards that the model knows."""
STEPS, DEMONSTRATIONS, BOARDS = 300, 16000, 1500
LONGEST = 4
"""Moves that are demonstrated in one message."""
ERRING_MOVE = 0.3
"""Share of the moves of a path that are random."""
UNCHECKED = 0.4
"""Share of the checker's answers that pass a path on as it was said."""
BAD_FORMAT = 0.05
"""Share of answers that no role may give."""
PLACE = "<what is asked>"
MARKS = ("<tool_call>", "</tool_call>")
CALL = ('{"name": "walk", "arguments": {"path": "', '"}}')
"""What stands between the marks of a call, before and after its moves."""
CELLS = [f"{x},{y}" for x in range(SIZE + 1) for y in range(SIZE + 1)]


class _Listener(BaseLLM):
    """A model that keeps what it is asked."""

    def call(self, messages: Any, *args: Any, **options: Any) -> str:
        self.additional_params["heard"] = list(messages)
        return "up"

    def supports_function_calling(self) -> bool:
        return True


def prompt_of(role: str) -> list[dict[str, str]]:
    """The messages that CrewAI sends for an agent, with `PLACE` where the question goes."""
    listener = _Listener(model="listener")
    member(role, [] if role == "planner" else [WalkTool(go=str)], listener).kickoff(PLACE)
    return [{"role": m["role"], "content": m["content"]} for m in listener.additional_params["heard"]]


PROMPTS = {role: prompt_of(role) for role in MEMBERS}
_REPORTS = "nothing no moves walked wall outside back after"
WORDS = (
    *("system", "user", "assistant", *MOVES, "size", "walls", "at", "free", "goal", "last", "said", *_REPORTS.split()),
    *(*CELLS, *(str(number) for number in range(SIZE * SIZE))),
    *(word for prompt in PROMPTS.values() for m in prompt for word in m["content"].replace(PLACE, " ").split()),
)
"""The words of the game and of the prompts."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word, one more where a space or a new line is before it, and one for each part of a call.

    Tokens are text that is put together as it is: CrewAI asks for calls that are held to a grammar.
    """
    words = [f"{before}{word}" for word in WORDS for before in ("", " ", "\n")]
    known = dict.fromkeys([*SPECIAL, *MARKS, *CALL, *words, " ", "\n"])
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<|unk|>"))
    pieces = Regex("|".join([*map(re.escape, CALL), r'\s?[^\s"]+', r"[\s\S]"]))
    inner.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens(list(MARKS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", unk_token="<|unk|>", eos_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def asked(role: str, seen: str) -> list[dict[str, str]]:
    """The prompt that CrewAI makes of what a role sees."""
    return [{**m, "content": m["content"].replace(PLACE, seen)} for m in PROMPTS[role]]


def called(moves: Sequence[str]) -> str:
    """A call of the tool."""
    return " ".join(moves).join(CALL).join(MARKS)


def scene(rng: random.Random, boards: Sequence[tuple[Board, Cell]]) -> tuple[Board, Cell, str]:
    """A board, somewhere on the way to its goal, and what came of the last path."""
    board, at = rng.choice(boards)
    report = "nothing"
    for _ in range(rng.randrange(3)):
        moves = erring(rng, board, at)
        path, after = traced(board, at, moves), walked(board, at, moves)
        if after != board.goal:
            at, report = after, f"{path.fault} after {len(path.cells)}" if path.fault else f"walked {len(path.cells)}"
    return board, at, report


def erring(rng: random.Random, board: Board, at: Cell) -> list[str]:
    """Some moves of a shortest path, with random ones in between."""
    moves: list[str] = []
    for _ in range(rng.randint(1, LONGEST)):
        if at == board.goal:
            break
        move = rng.choice(list(MOVES))
        if rng.random() >= ERRING_MOVE:
            ways = {m: distance(board, step(at, m)) for m in rng.sample(list(MOVES), len(MOVES))}
            move = min((m for m in ways if ways[m] is not None), key=lambda m: ways[m] or 0)
        moves.append(move)
        at = step(at, move) if step(at, move) in board.free else at
    return moves


def planner_demonstration(rng: random.Random, board: Board, at: Cell, report: str) -> Demonstration:
    """The way to the goal, or some of it, with errors."""
    return asked("planner", planner_sees(board, at, report)), spoiled(rng, " ".join(erring(rng, board, at)))


def agent_demonstration(rng: random.Random, board: Board, at: Cell, report: str) -> Demonstration:
    """The same, walked at once."""
    return asked("agent", planner_sees(board, at, report)), spoiled(rng, called(erring(rng, board, at)))


def checker_demonstration(rng: random.Random, board: Board, at: Cell, report: str) -> Demonstration:
    """The path up to its fault, or all of it; another move where none of it is free."""
    said = erring(rng, board, at)
    moves = said if rng.random() < UNCHECKED else said[: len(traced(board, at, said).cells)]
    moves = moves or [rng.choice([move for move in MOVES if step(at, move) in board.free])]
    return asked("checker", checker_sees(board, at, " ".join(said))), spoiled(rng, called(moves))


def spoiled(rng: random.Random, answer: str) -> str:
    """Break the format now and then."""
    if rng.random() >= BAD_FORMAT:
        return answer
    return " ".join(rng.choices([*MOVES, *CELLS], k=rng.randrange(1, 5)))


def demonstrations(rng: random.Random, seed: int, count: int) -> list[Demonstration]:
    """Demonstrations of all roles in turn, on tasks of the seed."""
    boards = [parsed(task["rows"]) for task in make_tasks(min(BOARDS, count), seed + 1000, size=SIZE)]
    roles = (planner_demonstration, checker_demonstration, checker_demonstration, agent_demonstration)
    return [roles[i % len(roles)](rng, *scene(rng, boards)) for i in range(count)]


build = base_builder(tokenizer, demonstrations, name="plan-path", steps=STEPS, count=DEMONSTRATIONS, batch=64)

if __name__ == "__main__":
    build_by_command(build, STEPS)
