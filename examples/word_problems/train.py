"""The word problems as a cotune workflow: what an answer is worth, and what each role's message is worth.

cotune train examples/word_problems/train.py:solve --config examples/word_problems/train.toml --model FILE --tasks FILE
"""

from __future__ import annotations

import re

import cotune
from cotune.types import Call, Candidate
from examples.word_problems.app import graph, verdict
from examples.word_problems.calculator import NOT_A_SUM, calculate
from examples.word_problems.tasks import Problem


@cotune.workflow
async def solve(task: Problem) -> bool:
    """Solve one problem."""
    state = await graph.ainvoke({"question": task["question"]})
    return state.get("answer") == task["answer"]


@solve.scorer("planner")
def sum_written(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """What the sum is worth for the question."""
    return planner_reward(candidate.text, task)


@solve.scorer("checker")
def verdict_given(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether the verdict on the calculated value is right."""
    return checker_reward(candidate.text, right=call.state["value"] == task["answer"])


def planner_reward(text: str, task: Problem) -> dict[str, float]:
    """`team` is 1 for the right value; `local` up to half a point for a sum with the question's numbers in it."""
    value = calculate(text)
    if value == NOT_A_SUM:
        return {"team": 0.0, "local": 0.0}
    asked, used = (set(re.findall(r"\d+", written)) for written in (task["question"], text))
    return {"team": float(value == task["answer"]), "local": 0.25 + 0.25 * len(asked & used) / len(asked)}


def checker_reward(text: str, *, right: bool) -> dict[str, float]:
    """`team` is 1 for the right verdict; `local` is -0.5 for anything but yes or no."""
    said = verdict(text)
    return {"team": float(said == right), "local": -0.5 if said is None else 0.0}
