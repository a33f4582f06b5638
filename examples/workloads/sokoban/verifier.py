"""What a game of Sokoban came to, worked out from the level and the moves alone, and what a message is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.workloads.sokoban.game import (
    Floor,
    Level,
    Position,
    carried_out,
    deadlocked,
    distance,
    moves_in,
    parsed,
    plan_in,
    solved,
    way_to_push,
)

BAD_FORMAT = -1.0
IMPOSSIBLE = -0.5
"""A plan that nobody can carry out."""
BUMP = -0.1
DEADLOCK = -1.0
MOVES_A_POINT = 4
"""Moves nearer to the solution that are worth a point."""


@dataclass(frozen=True)
class Verdict:
    """How a game ended. A game whose turns are over is not won, whatever anybody said."""

    won: bool
    deadlock: bool
    bumps: int
    unknown: tuple[str, ...]
    """Moves that there are not; they do nothing."""


def verdict(task: Level, moves: Sequence[str]) -> Verdict:
    """Play the moves from the start of the level."""
    floor, position = parsed(task["rows"])
    unknown = tuple(move for move in moves if moves_in(move) is None)
    position, bumps = carried_out(floor, position, [move for move in moves if move not in unknown])
    won = solved(floor, position)
    return Verdict(won, not won and deadlocked(floor, position), bumps, unknown)


def team_reward(floor: Floor, before: Position, after: Position) -> float:
    """A point for each four moves nearer to the solution and one for reaching it; -1 once there is none.

    Nothing can be earned by going back and forth: what a way earns depends on its ends alone.
    """
    here, there = distance(floor, before), distance(floor, after)
    if here is None:
        return 0.0
    if there is None:
        return DEADLOCK
    return (here - there) / MOVES_A_POINT + (solved(floor, after) and not solved(floor, before))


def planner_reward(floor: Floor, position: Position, text: str) -> dict[str, float]:
    """The pushes that the planner says, as if they were carried out on the shortest way."""
    plan = plan_in(text)
    if plan is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    moves = way_to_push(floor, position, *plan)
    if moves is None:
        return {"team": 0.0, "local": IMPOSSIBLE}
    return {"team": team_reward(floor, position, carried_out(floor, position, moves)[0]), "local": 0.0}


def executor_reward(floor: Floor, position: Position, text: str) -> dict[str, float]:
    """The moves that the executor makes."""
    moves = moves_in(text)
    if moves is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    after, bumps = carried_out(floor, position, moves)
    return {"team": team_reward(floor, position, after), "local": BUMP * bumps}
