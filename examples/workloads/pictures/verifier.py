"""What a walk came to, and what messages are worth, from the board alone."""

from __future__ import annotations

from examples.plan_path.grid import Cell, Grid, carry_out, moves_in
from examples.workloads.pictures.board import read, truth

BAD_FORMAT = -1.0
BUMP = -0.1
WRONG_WALL = -0.25
"""For each of the four walls that a description gets wrong: named and not there, or there and not named."""


def team_reward(grid: Grid, start: Cell, end: Cell) -> float:
    """Half a point for each move nearer to the goal, and one for reaching it."""
    return (grid.distance(start) - grid.distance(end)) / 2 + (end == grid.goal)


def describer_reward(grid: Grid, at: Cell, text: str) -> dict[str, float]:
    """Half a point for each direction in which the way to the goal is right; the walls as `local`."""
    found, right = read(text), truth(grid, at)
    if found is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    team = ((found.right == right.right) + (found.up == right.up)) / 2
    return {"team": team, "local": WRONG_WALL * len(found.walls ^ right.walls)}


def solver_reward(grid: Grid, at: Cell, text: str) -> dict[str, float]:
    """Half a point for each move nearer to the goal and one for reaching it; each bump as `local`."""
    moves = moves_in(text)
    if moves is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    done = carry_out(grid, at, moves)
    return {"team": team_reward(grid, at, done.at), "local": BUMP * done.bumps}
