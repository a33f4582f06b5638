"""Plan-Path as a cotune workflow: what its outcome is worth, and what each role's message is worth.

cotune train examples/workloads/plan_path_checked/train.py:solve \\
    --config examples/workloads/plan_path_checked/small.toml --tasks FILE
"""

from __future__ import annotations

import cotune
from cotune.types import Call, Candidate
from examples.workloads.plan_path_checked.app import Alone, PlanPath, Walk
from examples.workloads.plan_path_checked.board import Task, parsed
from examples.workloads.plan_path_checked.verifier import path_called, planner_reward, team_reward, verdict, walk_reward


def outcome(walk: Walk, task: Task) -> dict[str, float]:
    """How far the paths came; `success` is whether they reached the goal."""
    board, start = parsed(task["rows"])
    return {"team": team_reward(board, start, walk.position), "success": float(verdict(task, walk.paths).reached)}


solve = cotune.workflow(PlanPath, inputs=lambda task: {"task": task}, reward=outcome)
alone = cotune.workflow(Alone, inputs=lambda task: {"task": task}, reward=outcome)


@solve.scorer("planner")
def path_said(candidate: Candidate, call: Call, task: Task) -> dict[str, float]:
    """The path that the planner says, as if it were walked up to its fault."""
    walk = Walk(**call.state.flow)
    return planner_reward(walk.board, walk.position, candidate.text)


@alone.scorer("agent")
@solve.scorer("checker")
def path_walked(candidate: Candidate, call: Call, task: Task) -> dict[str, float]:
    """The path that the tool is called with."""
    walk = Walk(**call.state.flow)
    return walk_reward(walk.board, walk.position, path_called(candidate.tool_calls))
