"""The AutoGen application as a cotune workflow: what its outcome is worth, and what each role's message is worth.

cotune train examples/workloads/plan_path_autogen/train.py:solve \\
    --config examples/plan_path/train.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.plan_path.grid import Board, cell_of, grid_of
from examples.plan_path.rewards import driver_reward, navigator_reward, team_reward
from examples.workloads.plan_path_autogen import app


@cotune.workflow
async def solve(task: Board) -> dict[str, float]:
    """Walk one task; `success` is whether the goal was reached."""
    walk = await app.solve(task)
    return {"team": team_reward(grid_of(task), cell_of(task["start"]), walk.at), "success": float(walk.reached)}


@solve.scorer("navigator")
def moves_said(candidate: Candidate, call: Call, task: Board) -> dict[str, float]:
    """The moves that the navigator says, as if the driver carried them out from where the agent is."""
    return navigator_reward(grid_of(task), call.state.agent.model_context.walk.at, candidate.text)


@solve.scorer("driver")
def controls_pressed(candidate: Candidate, call: Call, task: Board) -> dict[str, float]:
    """The moves that the driver's controls stand for."""
    return driver_reward(grid_of(task), call.state.agent.model_context.walk.at, candidate.text)
