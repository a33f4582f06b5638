"""What the paths of a task came to, worked out from its board and the moves alone, and what a message is worth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.workloads.plan_path_checked.board import (
    TURNS,
    Board,
    Cell,
    Path,
    Task,
    distance,
    moves_in,
    parsed,
    traced,
    walked,
)

BAD_FORMAT = -1.0
FAULTY = -0.5
"""A path that hits a wall, leaves the board or comes back."""
MOVES_A_POINT = 4
"""Moves nearer to the goal that are worth a point."""


@dataclass(frozen=True)
class Verdict:
    """How a task ended."""

    reached: bool
    shortest: bool
    """Whether it was reached by as few moves as there can be."""
    faults: tuple[str, ...]
    """What was wrong with each path; empty where nothing was. None of the faulty ones is walked."""


def verdict(task: Task, paths: Sequence[Sequence[str]]) -> Verdict:
    """Walk the paths one after the other. Only those of the first turns count, up to the goal."""
    board, at = parsed(task["rows"])
    faults, moves = [], 0
    for path in map(list, paths[:TURNS]):
        if at == board.goal:
            break
        found = _traced(board, at, path)
        faults.append(found.fault)
        if not found.fault and found.cells:
            at, moves = found.cells[-1], moves + len(found.cells)
    reached = at == board.goal
    return Verdict(reached, reached and moves == task["shortest"], tuple(faults))


def team_reward(board: Board, before: Cell, after: Cell) -> float:
    """A point for each four moves nearer to the goal and one for reaching it.

    What a way earns depends on its ends alone, so that nothing is gained by going back and forth; moves are those of
    the shortest path, so that nothing is gained in a dead end beside the goal.
    """
    here, there = distance(board, before), distance(board, after)
    if here is None or there is None:
        return 0.0
    return (here - there) / MOVES_A_POINT + (there == 0 and here > 0)


def planner_reward(board: Board, at: Cell, text: str) -> dict[str, float]:
    """The path that the planner says, as if it were walked up to its fault."""
    moves = moves_in(text)
    if moves is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    path = traced(board, at, moves)
    end = path.cells[-1] if path.cells else at
    return {"team": team_reward(board, at, end), "local": FAULTY if path.fault else 0.0}


def walk_reward(board: Board, at: Cell, path: str | None) -> dict[str, float]:
    """The path that the tool is called with; None for a message that is no such call."""
    moves = None if path is None else moves_in(path)
    if moves is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    faulty = bool(traced(board, at, moves).fault)
    return {"team": team_reward(board, at, walked(board, at, moves)), "local": FAULTY if faulty else 0.0}


def path_called(tool_calls: Sequence[Mapping[str, Any]]) -> str | None:
    """The path of a message that calls the tool `walk` once; None for any other message."""
    if len(tool_calls) != 1 or tool_calls[0]["function"]["name"] != "walk":
        return None
    try:
        arguments = json.loads(tool_calls[0]["function"]["arguments"])
    except ValueError:
        return None
    path = arguments.get("path") if isinstance(arguments, dict) else None
    return path if isinstance(path, str) else None


def _traced(board: Board, at: Cell, path: list[str]) -> Path:
    """A path; one that consists of anything but moves leads nowhere."""
    moves = moves_in(" ".join(path))
    return Path((), "unknown") if moves is None else traced(board, at, moves)
