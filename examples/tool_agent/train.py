"""The shop's agent as a cotune workflow, with the reward of its answer and of each of its messages.

cotune train examples/tool_agent/train.py:solve --config examples/tool_agent/train.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import cotune
from cotune.types import Call, Candidate
from examples.tool_agent.app import answer
from examples.tool_agent.shop import Question, asked_for, calculate, find


@cotune.workflow
async def solve(task: Question) -> bool:
    """Answer one question."""
    return await answer(task["question"]) == task["answer"]


@solve.scorer("clerk")
def next_step(candidate: Candidate, call: Call, task: Question) -> float:
    """1 for the right next step, -1 for a tool call that cannot be read, 0 for anything else."""
    if candidate.malformed:
        return -1.0
    return float(is_right(candidate.text, candidate.tool_calls, call.messages, task))


def is_right(
    text: str, tool_calls: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], task: Question
) -> bool:
    """Whether a message is the next step: look the price up, then calculate, then say the number."""
    _, item = asked_for(task["question"])
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if task["answer"] in results:
        return text.strip() == task["answer"]
    if len(tool_calls) != 1:
        return False
    name, value = called(tool_calls[0])
    if find(item) in results:
        return name == "calculator" and calculate(value) == task["answer"]
    return name == "search" and find(value) == find(item)


def called(tool_call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tool and the argument of a call; the argument is empty if it is not a text."""
    function = tool_call["function"]
    arguments = json.loads(function["arguments"])
    key = {"search": "query", "calculator": "expression"}.get(function["name"], "")
    value = arguments.get(key) if isinstance(arguments, dict) else None
    return function["name"], value if isinstance(value, str) else ""
