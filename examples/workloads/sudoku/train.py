"""The Sudoku application as a cotune workflow: what its board is worth, and what each role's message is worth.

cotune train examples/workloads/sudoku/train.py:solve \\
    --config examples/workloads/sudoku/small.toml --model BASE --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.workloads.sandbox.required import sandbox_required
from examples.workloads.sudoku.app import board_of, graph, graph_without_tool, single_graph
from examples.workloads.sudoku.board import fills_in, fills_of
from examples.workloads.sudoku.verifier import Puzzle, filler_reward, planner_reward, solved


@cotune.workflow
async def solve(task: Puzzle) -> bool:
    """Solve one puzzle."""
    async with sandbox_required():
        state = await graph.ainvoke({"puzzle": task["puzzle"]})
    return solved(task["puzzle"], state["board"])


@cotune.workflow
async def alone(task: Puzzle) -> bool:
    """The same with a single agent."""
    async with sandbox_required():
        state = await single_graph.ainvoke({"puzzle": task["puzzle"]})
    return solved(task["puzzle"], state["board"])


@cotune.workflow
async def without_tool(task: Puzzle) -> bool:
    """The same with a single agent that cannot have programs run."""
    state = await graph_without_tool.ainvoke({"puzzle": task["puzzle"]})
    return solved(task["puzzle"], state["board"])


@solve.scorer("planner")
def cells_named(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """What it would lead to if the named cells were filled rightly."""
    return planner_reward(candidate.text, board_of(call.state), task)


@alone.scorer("agent")
@solve.scorer("filler")
def cells_filled(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """What the fills do to the board."""
    board = board_of(call.state)
    return filler_reward(fills_of(candidate.text, board), board, task)


@without_tool.scorer("agent")
def cells_filled_by_hand(candidate: Candidate, call: Call, task: Puzzle) -> dict[str, float]:
    """The same, of an agent without programs."""
    return filler_reward(fills_in(candidate.text), board_of(call.state), task)
