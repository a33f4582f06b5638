"""Sokoban as a cotune workflow: what its outcome is worth, and what each role's message is worth.

cotune train examples/sokoban/train.py:solve --config examples/sokoban/train.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.sokoban import app
from examples.sokoban.game import Level, parsed
from examples.sokoban.verifier import executor_reward, planner_reward, team_reward, verdict


@cotune.workflow
async def solve(task: Level) -> dict[str, float]:
    """Play one level; `success` is whether its moves solve it."""
    game = await app.solve(task)
    floor, start = parsed(task["rows"])
    return {"team": team_reward(floor, start, game.position), "success": float(verdict(task, game.moves).won)}


@solve.scorer("planner")
def pushes_said(candidate: Candidate, call: Call, task: Level) -> dict[str, float]:
    """The pushes that the planner says, as if they were carried out on the shortest way."""
    game = call.state.agent.game
    return planner_reward(game.floor, game.position, candidate.text)


@solve.scorer("executor")
def moves_made(candidate: Candidate, call: Call, task: Level) -> dict[str, float]:
    """The moves that the executor makes."""
    game = call.state.agent.game
    return executor_reward(game.floor, game.position, candidate.text)
