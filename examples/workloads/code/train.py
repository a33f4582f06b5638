"""The code workload as a cotune workflow: what the final program is worth, and what each role's message is worth.

cotune train examples/workloads/code/train.py:solve --config examples/workloads/code/train.toml --tasks FILE
"""

from __future__ import annotations

import asyncio
from typing import Any

import cotune
from cotune.types import Call, Candidate
from examples.workloads.code.app import asked, graph, single_graph
from examples.workloads.code.verifier import Problem, coder_reward, solved, tester_reward
from examples.workloads.sandbox.required import sandbox_required


@cotune.workflow
async def solve(task: Problem) -> dict[str, float]:
    """Solve one problem; `success` is a program that passes all hidden tests."""
    return await outcome(task, graph)


@cotune.workflow
async def alone(task: Problem) -> dict[str, float]:
    """The same with a single agent."""
    return await outcome(task, single_graph)


async def outcome(task: Problem, graph: Any) -> dict[str, float]:
    """What the last program is worth."""
    async with sandbox_required():
        state = await graph.ainvoke(asked(task))
        passed = await asyncio.to_thread(solved, state["program"], task)
    return {"team": passed, "success": float(passed == 1)}


@alone.scorer("agent")
@solve.scorer("coder")
def program_written(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """What the program is worth on the hidden tests."""
    return coder_reward(candidate.text, task)


@solve.scorer("tester")
def tests_written(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """What the tests are worth, and the program that they are for."""
    return tester_reward(candidate.text, call.state["program"], task)
