"""The word problems as a cotune workflow, with the reward of the answer and of each role's messages.

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
    """Reward the sum of the planner."""
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
    in_question, in_sum = set(re.findall(r"\d+", task["question"])), set(re.findall(r"\d+", text))
    used_share = len(in_question & in_sum) / len(in_question)
    return {"team": float(value == task["answer"]), "local": 0.25 + 0.25 * used_share}


def checker_reward(text: str, *, right: bool) -> dict[str, float]:
    """`team` is 1 for the right verdict; `local` is -0.5 for anything but yes or no."""
    accepts = verdict(text)
    return {"team": float(accepts == right), "local": -0.5 if accepts is None else 0.0}
