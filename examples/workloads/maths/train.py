"""The mathematics workload as a cotune workflow: what the answer is worth, and what each role's message is worth.

cotune train examples/workloads/maths/train.py:solve \\
    --config examples/workloads/maths/small.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import asyncio

import cotune
from cotune.types import Call, Candidate
from examples.workloads.code.programs import program_in, run
from examples.workloads.maths.answers import answer_in
from examples.workloads.maths.app import TURNS, Attempt
from examples.workloads.maths.verifier import Problem, agent_reward, judge_reward, reasoner_reward, right, tool_reward
from examples.workloads.sandbox.bubblewrap import Ran
from examples.workloads.sandbox.required import sandbox_required


@cotune.workflow
async def solve(task: Problem) -> bool:
    """Solve one problem; what the judge says counts."""
    async with sandbox_required():
        attempt = await Attempt(task["question"]).solve()
    return await asyncio.to_thread(right, answer_in(attempt.verdict), task)


@cotune.workflow
async def alone(task: Problem) -> bool:
    """The same with a single agent, which has the sandbox too."""
    async with sandbox_required():
        attempt = await Attempt(task["question"]).solve_alone()
    return await asyncio.to_thread(right, answer_in(attempt.verdict), task)


@cotune.workflow
async def without_tool(task: Problem) -> bool:
    """The same with a single agent that has no sandbox."""
    attempt = await Attempt(task["question"]).solve_without_tool()
    return await asyncio.to_thread(right, answer_in(attempt.verdict), task)


@alone.scorer("agent")
def said_alone(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether its answer is right, or its program prints what it did not know yet."""
    attempt: Attempt = call.state.agent.attempt
    answers = answer_in(candidate.text) is not None or attempt.turns == TURNS
    return agent_reward(candidate.text, None if answers else ran(candidate), attempt.ran, task)


@without_tool.scorer("reasoner")
@solve.scorer("reasoner")
def reasoned(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether its answer is right."""
    return reasoner_reward(candidate.text, task)


@solve.scorer("tool_user")
def programmed(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether its program prints the right answer."""
    return tool_reward(ran(candidate), task)


@solve.scorer("judge")
def judged(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether its answer is right."""
    return judge_reward(candidate.text, task)


def ran(candidate: Candidate) -> Ran | None:
    """How a candidate's program ends; None without one."""
    program = program_in(candidate.text)
    return None if program is None else run(program)
