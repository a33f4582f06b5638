"""The code-agent team as cotune workflows: the outcome of a task, and the reward of each agent's message.

cotune train examples/workloads/code_team/train.py:solve --config examples/workloads/code_team/train.toml --tasks FILE
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import cotune
from cotune.types import Call, Candidate
from examples.workloads.code_team.app import FLOWS, REJECT, State, decided, program_called, run_on_puzzle, start
from examples.workloads.code_team.puzzles import Puzzle, answer_in
from examples.workloads.code_team.verifier import answer_reward, rejection_reward, solved
from examples.workloads.sandbox.required import sandbox_required


async def outcome(task: Puzzle, flow: str) -> bool:
    """Play a task to its end. Returns whether the puzzle is solved."""
    async with sandbox_required():
        state = await FLOWS[flow].ainvoke(start(task), {"recursion_limit": 100})
    return solved(task, state["answers"])


@cotune.workflow
async def solve(task: Puzzle) -> bool:
    """Solve one puzzle: first the code agent, then the plan agent."""
    return await outcome(task, "solve")


@cotune.workflow
async def parallel(task: Puzzle) -> bool:
    """The same with both agents at the same time."""
    return await outcome(task, "parallel")


@cotune.workflow
async def alone_coder(task: Puzzle) -> bool:
    """The code agent alone: the answer of its program counts."""
    return await outcome(task, "alone_coder")


@cotune.workflow
async def alone_planner(task: Puzzle) -> bool:
    """The plan agent alone, without a program: the published single agent."""
    return await outcome(task, "alone_planner")


@cotune.workflow
async def recorded(task: Mapping[str, Any]) -> bool:
    """The flow that the task names: for recording examples of several flows in one run."""
    return await outcome(cast(Puzzle, task), task["flow"])


@solve.scorer("coder")
@parallel.scorer("coder")
@alone_coder.scorer("coder")
def program_written(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """The answer of the candidate's program to the puzzle as it is now."""
    state: State = call.state
    program = program_called(as_langchain(candidate.tool_calls))
    answer = None if program is None else run_on_puzzle(program, state["kind"], state["rows"])[1]
    return answer_reward(task, state["rows"], answer)


@solve.scorer("planner")
@parallel.scorer("planner")
def decision_made(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """The answer that the plan agent accepts or gives."""
    state: State = call.state
    if candidate.text.strip().rpartition("\n")[2].strip() == REJECT:
        return rejection_reward()
    return answer_reward(task, state["rows"], decided(state, candidate.text))


@alone_planner.scorer("planner")
def answer_given(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """The answer that the plan agent gives."""
    state: State = call.state
    return answer_reward(task, state["rows"], answer_in(state["kind"], candidate.text, len(state["rows"])))


def as_langchain(tool_calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls of the OpenAI form as LangChain parses them. A call whose arguments are no JSON object has none."""
    parsed: list[dict[str, Any]] = []
    for call in tool_calls:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            arguments = None
        parsed.append({"name": call["function"]["name"], "args": arguments if isinstance(arguments, dict) else {}})
    return parsed
