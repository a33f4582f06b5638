"""The mathematics workload as a cotune workflow: what the answer is worth, and what each role's message is worth.

cotune train examples/maths/train.py:solve --config examples/maths/train.toml --tasks FILE
"""

from __future__ import annotations

import asyncio

import cotune
from cotune.types import Call, Candidate
from examples.code.programs import program_in, sandbox
from examples.maths.answers import answer_in
from examples.maths.app import Attempt, run
from examples.maths.verifier import Problem, judge_reward, reasoner_reward, right, tool_reward


@cotune.workflow
async def solve(task: Problem) -> bool:
    """Solve one problem; what the judge says counts."""
    await asyncio.to_thread(sandbox)  # where there is none, the first episode says so
    attempt = await Attempt(task["question"]).solve()
    return await asyncio.to_thread(right, answer_in(attempt.verdict), task)


@solve.scorer("reasoner")
def reasoned(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether its answer is right."""
    return reasoner_reward(candidate.text, task)


@solve.scorer("tool_user")
def programmed(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether its program prints the right answer."""
    program = program_in(candidate.text)
    return tool_reward(None if program is None else run(program), task)


@solve.scorer("judge")
def judged(candidate: Candidate, call: Call, task: Problem) -> dict[str, float]:
    """Whether its answer is right."""
    return judge_reward(candidate.text, task)
