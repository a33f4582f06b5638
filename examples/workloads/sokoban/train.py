"""Sokoban as a cotune workflow: what its outcome is worth, and what each role's message is worth.

cotune train examples/workloads/sokoban/train.py:solve \\
    --config examples/workloads/sokoban/small.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.workloads.sokoban import app
from examples.workloads.sokoban.game import Level, parsed
from examples.workloads.sokoban.verifier import executor_reward, planner_reward, team_reward, verdict


@cotune.workflow
async def solve(task: Level) -> dict[str, float]:
    """Play one level; `success` is whether its moves solve it."""
    return outcome(task, await app.solve(task))


@cotune.workflow
async def alone(task: Level) -> dict[str, float]:
    """The same with a single agent."""
    return outcome(task, await app.solve_alone(task))


def outcome(task: Level, game: app.Game) -> dict[str, float]:
    """What a game came to."""
    floor, start = parsed(task["rows"])
    return {"team": team_reward(floor, start, game.position), "success": float(verdict(task, game.moves).won)}


@solve.scorer("planner")
def pushes_said(candidate: Candidate, call: Call, task: Level) -> dict[str, float]:
    """The pushes that the planner says, as if they were carried out on the shortest way."""
    game = call.state.agent.game
    return planner_reward(game.floor, game.position, candidate.text)


@alone.scorer("agent")
@solve.scorer("executor")
def moves_made(candidate: Candidate, call: Call, task: Level) -> dict[str, float]:
    """The moves that are made."""
    game = call.state.agent.game
    return executor_reward(game.floor, game.position, candidate.text)
