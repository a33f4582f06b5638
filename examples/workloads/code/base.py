"""Builds a base model that knows pieces of programs and, mostly, which of them solve a task: warmed up on imperfect
demonstrations.

    python -m examples.workloads.code.base --out runs/code/base --seed 0
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import Demonstration, base_builder, build_by_command, word_tokenizer
from examples.workloads.code.app import (
    CODER,
    CODER_AGAIN,
    TESTER,
    TESTER_AGAIN,
    State,
    asked,
    coder_messages,
    failure,
    tester_messages,
)
from examples.workloads.code.families import SMALL_FAMILIES, Family
from examples.workloads.code.programs import matches, program_in, tests_in
from examples.workloads.code.tasks import make_tasks, written
from examples.workloads.code.verifier import Problem
from examples.workloads.sandbox.bubblewrap import Ran

STEPS, DEMONSTRATIONS, PROBLEMS = 200, 12000, 1500
RIGHT, CORRECTED = 0.35, 0.5
"""Share of the programs that are right: of the first, and of those after one that failed a test."""
OWN_FAMILY = 0.6
"""Share of the wrong programs that are those of the task's family; the others are any."""
RIGHT_OUTPUT = 0.6
"""Share of the tests that expect what the right program writes; the others expect what a wrong one does."""
MOST_TESTS = 2
"""Tests in a message."""
BEGUN = 0.5
"""Share of a team's demonstrations that come after a program was run."""
BAD_FORM = 0.05
"""Share of answers with their pieces in another order."""
TESTED = [str(number) for number in range(-1, 5)]
INPUTS = [" ".join(given) for count in (1, 2, 3) for given in itertools.product(TESTED, repeat=count)]
"""The inputs of the tests."""
NUMBERS = range(-70, 71)
OPENS, CLOSES = "```python\n", "\n```"
TEST = ("**Test Input:**\n```\n", "\n```\n**Test Output:**\n```\n")
"""What stands before a test's input, and before its output; `CLOSES` ends it."""
AT_ONCE = 18
"""Programs that run in one process, on all `INPUTS`."""


@dataclass(frozen=True)
class Written:
    """A program of the demonstrations: its pieces, and what it writes on each of `INPUTS`."""

    pieces: tuple[str, ...]
    outputs: Mapping[str, str]


def pieces_of(template: str, a: int) -> list[str]:
    """A program of a family cut at its number, at operators that are easily confused, and at the ends of its lines."""
    cut = re.findall(r"\$a|>=|>|%|(?:(?!\$a|>=|>|%)[^\n])+\n?", template)
    return [str(a) if piece == "$a" else piece.strip(" ") for piece in cut if piece != " "]


def said(pieces: Sequence[str]) -> str:
    """Pieces as a message: with a space between two of them, but at the beginning of a line."""
    return " ".join(pieces).replace("\n ", "\n")


@functools.cache
def programs() -> dict[str, tuple[Written, ...]]:
    """By the right program: itself, and the wrong ones of its family with the same number."""
    named = [(family, a) for family in SMALL_FAMILIES for a in family.values]
    every = [(OPENS, *pieces_of(text, a), CLOSES) for family, a in named for text in (family.right, *family.wrong)]
    outputs = written([(program_in(said(pieces)) or "", INPUTS) for pieces in every], AT_ONCE)
    made = (Written(pieces, dict(zip(INPUTS, outs, strict=True))) for pieces, outs in zip(every, outputs, strict=True))
    return {_filled(family.right, a): tuple(itertools.islice(made, 1 + len(family.wrong))) for family, a in named}


def _filled(text: str, a: int) -> str:
    return string.Template(text).substitute(a=a)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each number, piece of a program, word of a question, and text of the application.

    A line begins without a space, or it would be no program.
    """
    fast = word_tokenizer(
        [
            *(CODER, TESTER, CODER_AGAIN, TESTER_AGAIN, *map(str, NUMBERS), OPENS, CLOSES, *TEST),
            *("system", "user", "assistant", "Input:", "Output:", "Program:", "The test expects:", "It wrote:", "none"),
            *("(none)", "There is no program.", "There are no tests.", "It did not end well (exit, code 1):"),
            *(word for family in SMALL_FAMILIES for a in family.values for word in _words(family, a)),
        ]
    )
    fast.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), decoders.Replace("\n ", "\n")]
    )
    return fast


def _words(family: Family, a: int) -> list[str]:
    templates = (family.right, *family.wrong)
    return [*_filled(family.question, a).split(), *(piece for text in templates for piece in pieces_of(text, a))]


def demonstration(rng: random.Random, task: Problem, role: str) -> Demonstration:
    """A role's answer, at the beginning or after a program was run; a single agent has only the beginning."""
    state = asked(task)
    if role != "agent" and rng.random() < BEGUN:
        state = {**state, **failed(rng, task)}
    if role == "tester":
        return tester_messages(state), spoiled(rng, [piece for test in tests(rng, task) for piece in test])
    share = CORRECTED if state.get("failures") else RIGHT
    return coder_messages(state), spoiled(rng, program(rng, task, share).pieces)


def failed(rng: random.Random, task: Problem) -> State:
    """A program and tests, and where they disagree: nowhere, if they agree."""
    before = program(rng, task, RIGHT)
    shown = tests_in(said([piece for test in tests(rng, task) for piece in test]))
    pairs = [(Ran(0, "exit", before.outputs[test["input"].strip()], "", False, 0.0), test) for test in shown]
    failures = [failure(ran, test) for ran, test in pairs if not matches(ran, test)]
    return {"program": program_in(said(before.pieces)), "failures": failures}


def program(rng: random.Random, task: Problem, share: float) -> Written:
    """The right program, in a share of all; else a wrong one of its family, or any program of any task."""
    right, *wrong = programs()[task["reference"]]
    if rng.random() < share:
        return right
    return rng.choice(wrong) if rng.random() < OWN_FAMILY else rng.choice(rng.choice(list(programs().values())))


def tests(rng: random.Random, task: Problem) -> list[tuple[str, ...]]:
    """Tests of the task, each in pieces; of some the output is what a wrong program writes."""
    right, *wrong = programs()[task["reference"]]
    made = []
    for given in rng.sample(INPUTS, rng.randint(1, MOST_TESTS)):
        by = right if rng.random() < RIGHT_OUTPUT else rng.choice(wrong)
        made.append((TEST[0], *given.split(), TEST[1], *by.outputs[given].split(), CLOSES))
    return made


def spoiled(rng: random.Random, pieces: Sequence[str]) -> str:
    """An answer; now and then, with its pieces in another order."""
    return said(pieces if rng.random() >= BAD_FORM else rng.sample(pieces, len(pieces)))


def demonstrations(rng: random.Random, seed: int, count: int) -> list[Demonstration]:
    """Demonstrations of all roles in turn, on tasks of the seed."""
    tasks = make_tasks(count, seed + 1000, families=SMALL_FAMILIES, problems=PROBLEMS)
    rng.shuffle(tasks)
    roles = ("coder", "tester", "agent")
    return [demonstration(rng, task, roles[number % len(roles)]) for number, task in enumerate(tasks)]


build = base_builder(tokenizer, demonstrations, name="code", steps=STEPS, count=DEMONSTRATIONS)

if __name__ == "__main__":
    build_by_command(build, STEPS)
