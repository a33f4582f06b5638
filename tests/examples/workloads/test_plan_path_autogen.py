"""The Plan-Path team as an AutoGen application: what it is, and that it learns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.adapters.export import export_run
from cotune.integrations.apps.activation import activate
from cotune.records.structs import Message
from cotune.trainer.config.load import load_config
from cotune.trainer.train import train as run_training
from examples.plan_path import base, grid
from examples.workloads.plan_path_autogen import app, train
from tests.examples.applications import check_knows_nothing_of_cotune, models_asked_by
from tests.integrations.recorded import Recorded

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "workloads" / "plan_path_autogen"
activate()
TASK = next(t for t in grid.make_tasks(30, 5) if grid.grid_of(t).distance(grid.cell_of(t["start"])) == 4)
BOARD = grid.grid_of(TASK)


def trained(folder: Path, steps: int, *, seen: int, tasks: int, k: int = 8) -> Path:
    """A training on a base that has seen the game for so many steps."""
    base.build(folder / "base", steps=seen, count=40 * seen)
    settings = {"model": str(folder / "base"), "steps": steps, "tasks_per_step": tasks, "concurrency": tasks}
    settings["plan"] = {"kind": "tree", "k": k}
    settings["evaluation"] = {"tasks": "none"}  # walks of hundreds of calls
    gentle = {"learner": {"lr": 1.5e-3}, "schedule": {"kind": "constant"}}
    config = load_config(ROOT / "examples" / "plan_path" / "train.toml", {**settings, **gentle})
    run_training(train.solve, list(grid.make_tasks(128, 0)), config, out=folder / "run")
    return folder / "run"


def best(role: str, call: Any) -> str:
    """What a perfect player of a role would say."""
    walk = call.state.agent.model_context.walk
    if role == "navigator":
        free = [move for move in grid.MOVES if walk.grid.free(grid.step(walk.at, move))]
        return min(free, key=lambda move: walk.grid.distance(grid.step(walk.at, move)))
    heard = call.messages[-1]["content"].split("said ")[1].split()
    return " ".join(dict(walk.grid.controls)[move] for move in heard)


def test_the_application_knows_nothing_of_cotune() -> None:
    check_knows_nothing_of_cotune(FOLDER / "app.py")


def test_roles_and_prompts_are_those_of_the_langgraph_team() -> None:
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    rewards = record(solve, lambda call: best(call.role, call)).rewards
    assert rewards == {"team": 4 / 2 + 1}
    assert record.roles == ["navigator", "driver"] * 4
    stored = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    seen = [[{k: m[k] for k in ("role", "content")} for m in map(stored.get, c.messages)] for c in record.calls]
    start, said = grid.cell_of(TASK["start"]), record.calls[0].candidates[0].text
    assert seen[0] == grid.navigator_messages(BOARD, start)
    assert seen[1] == grid.driver_messages(BOARD, said)
    assert seen[2] == grid.navigator_messages(BOARD, grid.carry_out(BOARD, start, [said]).at)


def test_the_application_runs_alone() -> None:
    asked = models_asked_by("examples.workloads.plan_path_autogen.app", answer="up", ends="0 of 2 reached the goal\n")
    assert asked["driver"] == 2 * grid.ROUNDS


@pytest.mark.long
def test_it_learns(tmp_path: Path) -> None:
    run = trained(tmp_path, 5, seen=60, tasks=16)
    steps = [json.loads(line)["roles"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    for role in ("navigator", "driver"):
        assert steps[-1][role]["reward"] > steps[0][role]["reward"] + 0.05


def test_it_takes_the_trained_policies_back(in_thread: None, tmp_path: Path) -> None:
    export_run(trained(tmp_path, 1, seen=2, tasks=1, k=2), tmp_path / "export")
    with cotune.deployed(tmp_path / "export") as deployment:
        walk = asyncio.run(app.solve(TASK))
    assert 1 <= walk.rounds <= grid.ROUNDS
    assert deployment.calls == {("navigator", "ok"): walk.rounds, ("driver", "ok"): walk.rounds}
    assert not deployment.passed_through
