"""What a user can do wrong, and `mypy --strict` says so: one error in each line that names one."""

import cotune
from cotune.types import Call, Candidate


@cotune.workflow
def solve(task: str) -> float:
    return 1.0


@solve.scorer("planner")  # error: type-var
def two(candidate: Candidate, call: Call) -> float:
    return 1.0


@solve.scorer("tester")  # error: type-var
def text(candidate: Candidate, call: Call, task: str) -> str:
    return str(call.prompt_ids)  # error: attr-defined


@cotune.workflow  # error: type-var
def nothing(task: str) -> None: ...


cotune.train(tasks=[])  # error: call-arg
cotune.evaluate("runs/r1", two, [])  # error: arg-type
cotune.trane(solve, [])  # error: attr-defined
with cotune.gateway() as gate:
    print(gate.address)  # error: attr-defined
with cotune.deployed(3):  # error: arg-type
    solve(task=1)  # error: arg-type
