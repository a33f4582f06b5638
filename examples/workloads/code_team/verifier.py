"""When a puzzle is solved, worked out from the task and the answers alone, and how much each message earns."""

from __future__ import annotations

from collections.abc import Sequence

from examples.workloads.code_team.puzzles import REACHED, Puzzle, carry_out, is_solved
from examples.workloads.plan_path_checked import board
from examples.workloads.plan_path_checked import verifier as plan_path
from examples.workloads.sokoban import game
from examples.workloads.sokoban import verifier as sokoban

BAD_FORMAT = -1.0
"""For a message without an answer: no readable call, a program that fails, or a decision that cannot be read."""
USELESS = -0.1
"""For each move that does nothing, and for a grid that is not the solution."""
MOST_USELESS = -0.5
RIGHT_CELLS = 0.5
"""For a grid whose empty cells are all right, in proportion."""


def solved(task: Puzzle, answers: Sequence[Sequence[str]]) -> bool:
    """Whether these answers, carried out one after the other from the start, solve the task within its turns."""
    rows = task["rows"]
    for answer in answers[: task.get("turns", len(answers))]:
        rows, _ = carry_out(task["kind"], rows, answer)
    return is_solved(task["kind"], rows)


def answer_reward(task: Puzzle, rows: Sequence[str], answer: Sequence[str] | None) -> dict[str, float]:
    """The reward of an answer to the puzzle as it is now, as if it were carried out.

    `team` is the progress. In Plan-Path and Sokoban, this is a point for each four moves nearer to the solution, one
    for reaching it, and -1 for a level that nothing can solve any more. In Sudoku, it is 1 for the solution, and half
    the share of the empty cells that are right. `local` is the penalty for an answer that is missing or partly useless.
    """
    if answer is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    after, useless = carry_out(task["kind"], rows, answer)
    return {"team": progress(task, rows, after, answer), "local": max(MOST_USELESS, USELESS * useless)}


def progress(task: Puzzle, before: Sequence[str], after: Sequence[str], answer: Sequence[str]) -> float:
    """The team's reward for a turn that led from `before` to `after`."""
    if task["kind"] == "sudoku":
        right = missing = 0
        for clues, row, solution in zip(before, answer, task["solution"], strict=True):
            for clue, value, solved_value in zip(clues, row, solution, strict=True):
                missing += clue != solved_value
                right += clue != solved_value and value == solved_value
        return float(is_solved("sudoku", after)) + RIGHT_CELLS * right / max(1, missing)
    if task["kind"] == "sokoban":
        floor, position = game.parsed(before)
        return sokoban.team_reward(floor, position, game.parsed(after)[1])
    floor, at = board.parsed(before)
    reached = any(REACHED in row for row in after)
    return plan_path.team_reward(floor, at, floor.goal if reached else board.parsed(after)[1])


def rejection_reward() -> dict[str, float]:
    """The reward for asking for another program: better than a harmful answer, worse than a useful one."""
    return {"team": 0.0, "local": 0.0}
