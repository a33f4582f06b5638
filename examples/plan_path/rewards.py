"""Rewards of candidates: the effect of a message if the application continued with it. Pure functions of the board and
the text."""

from __future__ import annotations

from collections.abc import Sequence

from examples.plan_path.grid import Cell, Grid, carry_out, moves_in, moves_of

BAD_FORMAT = -1.0
BUMP = -0.1


def navigator_reward(grid: Grid, at: Cell, text: str) -> dict[str, float]:
    """The moves that the navigator says, as if the driver carried them out."""
    return _reward(grid, at, moves_in(text))


def driver_reward(grid: Grid, at: Cell, text: str) -> dict[str, float]:
    """The moves that the driver's controls stand for."""
    return _reward(grid, at, moves_of(grid, text))


def team_reward(grid: Grid, start: Cell, end: Cell) -> float:
    """Half a point for each move nearer to the goal, and one for reaching it."""
    return (grid.distance(start) - grid.distance(end)) / 2 + (end == grid.goal)


def _reward(grid: Grid, at: Cell, moves: Sequence[str] | None) -> dict[str, float]:
    if moves is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    effect = carry_out(grid, at, moves)
    return {"team": team_reward(grid, at, effect.at), "local": BUMP * effect.bumps}
