"""The Plan-Path application as a cotune workflow, with the reward of its outcome and of each role's messages.

cotune train examples/plan_path/train.py:solve --config examples/plan_path/train.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.plan_path.app import graph, position
from examples.plan_path.grid import Board, cell_of, grid_of
from examples.plan_path.rewards import driver_reward, navigator_reward, team_reward


@cotune.workflow
async def solve(task: Board) -> dict[str, float]:
    """Walk one task; `success` is whether the goal was reached."""
    state = await graph.ainvoke({"task": task})
    start, end = cell_of(task["start"]), cell_of(state["at"])
    return {"team": team_reward(grid_of(task), start, end), "success": float(state["reached"])}


@solve.scorer("navigator")
def moves_said(candidate: Candidate, call: Call, task: Board) -> dict[str, float]:
    """The moves that the navigator says, as if the driver carried them out from where the agent is."""
    return navigator_reward(grid_of(task), position(call.state), candidate.text)


@solve.scorer("driver")
def controls_pressed(candidate: Candidate, call: Call, task: Board) -> dict[str, float]:
    """The moves that the driver's controls stand for."""
    return driver_reward(grid_of(task), position(call.state), candidate.text)
