"""What a program and what tests are worth.

A program is judged by hidden tests, of which no role sees any. Tests are judged by a right program and by known wrong
ones: a test counts if the right program passes it, and is worth the share of wrong programs that fail it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from examples.workloads.code.programs import Test, passed, passes_all, program_in, share, tests_in


class Problem(TypedDict):
    """A task. `examples` are in the question; `tests` are hidden; `function` is its name where one is asked for, else
    empty; `reference` is a right program, empty where none is known; `wrong` are programs that fail hidden tests."""

    id: str
    question: str
    examples: list[Test]
    tests: list[Test]
    function: str
    reference: str
    wrong: list[str]


def solved(program: str | None, task: Problem) -> float:
    """The share of hidden tests that a program passes."""
    return share(passed(program, task["tests"], task["function"]))


def coder_reward(message: str, task: Problem) -> dict[str, float]:
    """`team` and `local` are both the share of hidden tests that the program passes, as published."""
    found = solved(program_in(message), task)
    return {"team": found, "local": found}


def tester_reward(message: str, program: str | None, task: Problem) -> dict[str, float]:
    """`team` is what the coder's program is worth; `local` what the tests are."""
    return {"team": solved(program, task), "local": tests_worth(tests_in(message), task)}


def tests_worth(tests: Sequence[Test], task: Problem) -> float:
    """The share of tests that the reference passes, times the share of wrong programs that fail one of those.

    The published reward is the first factor alone, which tests that every program passes earn in full. Copies of the
    examples in the question count as failed. 0 without a reference or wrong programs to judge by.
    """
    shown = {test["input"].strip() for test in task["examples"]}
    fresh = [test for test in tests if test["input"].strip() not in shown]
    if not fresh or not task["reference"] or not task["wrong"]:
        return 0.0
    right = passed(task["reference"], fresh, task["function"])
    valid = [test for test, accepted in zip(fresh, right, strict=True) if accepted]
    if not valid:
        return 0.0
    refused = [not passes_all(program, valid, task["function"]) for program in task["wrong"]]
    return len(valid) / len(tests) * share(refused)
