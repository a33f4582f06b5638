"""The picture application as a cotune workflow: whether the goal was reached, and what each role's message is worth.

cotune train examples/workloads/pictures/train.py:solve --config examples/workloads/pictures/train.toml --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.plan_path.grid import Board, cell_of, grid_of
from examples.workloads.pictures.app import State, graph, position, single_graph
from examples.workloads.pictures.verifier import describer_reward, solver_reward, team_reward


@cotune.workflow
async def solve(task: Board) -> dict[str, float]:
    """Walk one grid."""
    return outcome(task, await graph.ainvoke({"task": task}))


@cotune.workflow
async def alone(task: Board) -> dict[str, float]:
    """The same with a single agent."""
    return outcome(task, await single_graph.ainvoke({"task": task}))


def outcome(task: Board, state: State) -> dict[str, float]:
    """How much nearer the walk came to the goal; `success` is whether it was reached."""
    start, end = cell_of(task["start"]), cell_of(state["at"])
    return {"team": team_reward(grid_of(task), start, end), "success": float(state["reached"])}


@solve.scorer("describer")
def described(candidate: Candidate, call: Call, task: Board) -> dict[str, float]:
    """What is right of the description of the picture."""
    return describer_reward(grid_of(task), position(call.state), candidate.text)


@alone.scorer("agent")
@solve.scorer("solver")
def moved(candidate: Candidate, call: Call, task: Board) -> dict[str, float]:
    """Where its moves lead."""
    return solver_reward(grid_of(task), position(call.state), candidate.text)
