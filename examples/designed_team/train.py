"""The designed team as a cotune workflow: each design is carried out several times, and designer and agents learn.

cotune train examples/designed_team/train.py:solve --config examples/designed_team/train.toml --tasks FILE
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from statistics import fmean

import numpy as np

import cotune
from cotune.methods import Attribution, Filters, Floats, Method, Step, standardized
from cotune.types import CallRequest
from examples.designed_team.app import DESIGNER, Agent, design, execute
from examples.designed_team.tasks import Task

EXECUTOR = "executor"
current_execution: ContextVar[int] = ContextVar("current_execution")
"""The number of the execution that the running code belongs to, from 1 on.

It has no default: a call that has lost its context fails the episode, and is not taken for a call of execution 1.
"""


def role_of(call: CallRequest) -> str:
    """The role of a call: the designer, or `executor N` for any agent in execution N of a design.

    The names of agents are invented anew in each episode. This rule gives them all the policy of the executors.
    """
    return DESIGNER if call.model == DESIGNER else f"{EXECUTOR} {current_execution.get()}"


@cotune.workflow(roles=role_of)
async def solve(task: Task) -> dict[str, float]:
    """Let the designer write a team, unless the task has a fixed one, and carry out its work as often as it says."""
    operations = task["operations"]
    if task["team"] == "one agent":
        return outcome(await executions([Agent("solver", tuple(operations))], task))
    if task["team"] == "an agent each":
        return outcome(await executions([Agent("solver", (operation,)) for operation in operations], task))
    agents = await design(operations)
    results = await executions(agents, task) if agents else [0.0] * task["executions"]
    return {DESIGNER: fmean(results), **outcome(results)}


async def executions(agents: Sequence[Agent], task: Task) -> list[float]:
    """Carry out one design several times at once. Returns 1 for each right answer, and 0 for others."""

    async def execution(number: int) -> float:
        current_execution.set(number)  # in the context of this task alone
        return float(await execute(agents, task["number"]) == task["answer"])

    return await asyncio.gather(*(execution(number + 1) for number in range(task["executions"])))


def outcome(results: Sequence[float]) -> dict[str, float]:
    """The results of a team: the share of right answers, and the reward of each execution's role."""
    rewards = {"success": fmean(results)}
    for number, result in enumerate(results, 1):
        rewards[f"{EXECUTOR} {number}"] = result
    return rewards


class DesignedTeam(Method):
    """The comparisons of MetaAgent-X (arXiv 2605.14212): M designs of a task, each carried out N times.

        designer:  R_m = mean of r_mn over n,    A_m = (R_m - mean(R)) / (std(R) + 1e-6) over the M designs
        executor:                                A_mn = (r_mn - mean(r_m)) / (std(r_m) + 1e-6) over the N executions

    r_mn is the result of execution n of design m. All calls of an execution have its advantage. Executions are only
    compared with others of the same design, so agents are not blamed for a bad design. Means and deviations are over
    calls, which equals the paper's formula only if all executions of a design make equally many calls.
    """

    name = "designed_team"
    group_by = ("task", "policy")
    attribution = Attribution(own=False, outcome=True, seats=True)
    filters = Filters(zero_advantage=True)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            if step.samples[group[0]].role == DESIGNER:
                advantages[group] = standardized(rewards[group], ddof=0)
        for group in step.group_by("rollout", "policy"):
            if step.samples[group[0]].role != DESIGNER:
                advantages[group] = standardized(rewards[group], ddof=0)
        return advantages
