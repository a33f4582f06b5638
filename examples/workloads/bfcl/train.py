"""The application as a cotune workflow: the benchmark's own check of what was done, and what each message is worth.

cotune train examples/workloads/bfcl/train.py:solve \\
    --config examples/workloads/bfcl/train.toml --model FILE --tasks tasks.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cotune
from cotune.types import Call, Candidate
from examples.workloads.bfcl.app import graph
from examples.workloads.bfcl.desk import Desk, parse
from examples.workloads.bfcl.tasks import Request, open_desk


@cotune.workflow
async def solve(task: Request) -> dict[str, float]:
    """Do all requests of a task; `team` is the share that is done before the first that is not."""
    desk, right = open_desk(task), open_desk(task)
    done = 0
    for request, truth in zip(task["requests"], task["truth"], strict=True):
        await graph.ainvoke({"request": request}, {"configurable": {"desk": desk}})
        if not is_done(desk, right, truth):
            break
        done += 1
    return {"team": done / len(task["requests"]), "success": float(done == len(task["requests"]))}


@solve.scorer("chooser")
def tool_chosen(candidate: Candidate, call: Call, task: Request) -> dict[str, float]:
    """What the tool is worth at this place."""
    return {"local": chooser_reward(candidate.text.strip(), call.state.get("so_far", []), _truth(call, task))}


@solve.scorer("caller")
def call_written(candidate: Candidate, call: Call, task: Request) -> dict[str, float]:
    """What the call is worth for the tool that was chosen."""
    return {"local": caller_reward(candidate.text.strip(), call.state["tool"], _truth(call, task), open_desk(task))}


def is_done(desk: Desk, right: Desk, truth: Sequence[str]) -> bool:
    """The benchmark's criterion, after the right calls were made on `right`: the same state, and their results seen."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

    before = len(right.results)
    for call in truth:
        right.execute(call)
    ours, theirs = ({type(one).__name__: one for one in of.objects} for of in (desk, right))
    return bool(
        state_checker(ours, theirs)["valid"] and response_checker(desk.results, right.results[before:], 0)["valid"]
    )


def chooser_reward(name: str, so_far: Sequence[str], truth: Sequence[str]) -> float:
    """1 for the tool that comes next, or `done` after the last; a half for one that comes later; -0.5 for the rest."""
    left = [call.partition("(")[0] for call in truth]
    for made in so_far:
        if (tool := made.partition("(")[0]) in left:
            left.remove(tool)
    if not left or name not in left:
        return 1.0 if not left and name == "done" else -0.5
    return 1.0 if name == left[0] else 0.5


def caller_reward(text: str, tool: str, truth: Sequence[str], desk: Desk) -> float:
    """The share of right arguments among those of the best fitting right call of the tool; -0.5 for no call of it."""
    names = [name.strip() for name in desk.describe(tool).partition(")")[0].partition("(")[2].split(",")]
    try:
        written = _arguments(text, tool, names)
    except ValueError:
        return -0.5
    expected = [_arguments(call, tool, names) for call in truth if call.startswith(f"{tool}(")]
    return max((_share(written, one) for one in expected), default=0.0)


def _arguments(call: str, tool: str, names: Sequence[str]) -> dict[str, Any]:
    name, given, named = parse(call)
    if name != tool or len(given) > len(names):
        raise ValueError("another tool")
    return {**dict(zip(names, given, strict=False)), **named}


def _share(written: dict[str, Any], expected: dict[str, Any]) -> float:
    keys = written.keys() | expected.keys()
    return sum(written.get(k) == expected.get(k) for k in keys) / len(keys) if keys else 1.0


def _truth(call: Call, task: Request) -> list[str]:
    return task["truth"][task["requests"].index(call.state["request"])]
