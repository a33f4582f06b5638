"""The Plan-Path team as a CrewAI application: what it is, and that it learns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.adapters.export import export_run
from cotune.records.structs import Message
from cotune.trainer.config.load import load_config
from cotune.trainer.train import train as run_training
from examples.plan_path import grid
from examples.workloads.plan_path_crewai import app, base, train
from tests.examples.applications import check_knows_nothing_of_cotune, models_asked_by
from tests.integrations.recorded import Recorded

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "workloads" / "plan_path_crewai"
TASK = next(t for t in grid.make_tasks(30, 5) if grid.grid_of(t).distance(grid.cell_of(t["start"])) == 4)
BOARD = grid.grid_of(TASK)


def trained(folder: Path, steps: int, *, seen: int, tasks: int, k: int = 8) -> Path:
    """A training on a base that has seen the game for so many steps."""
    base.build(folder / "base", steps=seen, count=30 * seen)
    settings = {"model": str(folder / "base"), "steps": steps, "tasks_per_step": tasks, "concurrency": tasks}
    settings["plan"] = {"kind": "tree", "k": k}
    settings["evaluation"] = {"tasks": "none"}  # walks of hundreds of calls
    config = load_config(ROOT / "examples" / "plan_path" / "train.toml", {**settings, "schedule": {"kind": "constant"}})
    run_training(train.solve, list(grid.make_tasks(6, 0)), config, out=folder / "run")
    return folder / "run"


def best(call: Any) -> str:
    """What a perfect player of a role would say."""
    at = app.Walk(**call.state.flow).position
    if call.role == "navigator":
        free = [move for move in grid.MOVES if BOARD.free(grid.step(at, move))]
        return min(free, key=lambda move: BOARD.distance(grid.step(at, move)))
    return " ".join(dict(BOARD.controls)[move] for move in call.state.flow["message"].split())


def test_the_application_knows_nothing_of_cotune() -> None:
    check_knows_nothing_of_cotune(FOLDER / "app.py")


def test_roles_are_the_agents_and_prompts_those_of_the_base() -> None:
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    assert record(solve, best).rewards == {"team": 4 / 2 + 1}
    assert record.roles == ["navigator", "driver"] * 4
    stored = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    for call, asked in ((record.calls[0], grid.view(BOARD, grid.cell_of(TASK["start"]))),):
        wanted = [{**m, "content": m["content"].replace(base.PLACE, asked)} for m in base.PROMPTS[call.role]]
        assert [{k: stored[i][k] for k in ("role", "content")} for i in call.messages] == wanted


def test_the_application_runs_alone() -> None:
    asked = models_asked_by("examples.workloads.plan_path_crewai.app", answer="up", ends="0 of 2 reached the goal\n")
    assert asked["driver"] == 2 * grid.ROUNDS


def test_an_empty_answer_costs_a_turn_not_the_walk() -> None:
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    walked = record(solve, lambda call: best(call) if call.turn else "")
    assert (walked.episode.status, walked.rewards) == ("ok", {"team": 4 / 2 + 1})
    assert record.roles == ["navigator", "driver"] * 5


@pytest.mark.long
def test_it_learns(tmp_path: Path) -> None:
    run = trained(tmp_path, 5, seen=50, tasks=6)
    steps = [json.loads(line)["roles"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    for role in ("navigator", "driver"):
        assert sum(step[role]["reward"] for step in steps[-2:]) / 2 > steps[0][role]["reward"] + 0.08


def test_it_takes_the_trained_policies_back(in_thread: None, tmp_path: Path) -> None:
    export_run(trained(tmp_path, 1, seen=2, tasks=1, k=2), tmp_path / "export")
    with cotune.deployed(tmp_path / "export") as deployment:
        walk = asyncio.run(app.walk(TASK))
    assert 1 <= walk.rounds <= grid.ROUNDS
    assert deployment.calls == {("navigator", "ok"): walk.rounds, ("driver", "ok"): walk.rounds}
    assert not deployment.passed_through
