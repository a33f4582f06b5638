"""The Sudoku application as a cotune workflow: what its board is worth, and what each role's message is worth.

cotune train examples/sudoku/train.py:solve --config examples/sudoku/train.toml --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.code.programs import sandbox
from examples.sudoku.app import board_of, graph
from examples.sudoku.board import fills_of
from examples.sudoku.verifier import Puzzle, filler_reward, planner_reward, solved


@cotune.workflow
async def solve(task: Puzzle) -> bool:
    """Solve one puzzle."""
    state = await graph.ainvoke({"puzzle": task["puzzle"]})
    return solved(task["puzzle"], state["board"])


@solve.scorer("planner")
def cells_named(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """What it would lead to if the named cells were filled rightly."""
    return planner_reward(candidate.text, board_of(call.state), task)


@solve.scorer("filler")
def cells_filled(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """What the fills do to the board."""
    board = board_of(call.state)
    return filler_reward(fills_of(candidate.text, board, sandbox()), board, task)
