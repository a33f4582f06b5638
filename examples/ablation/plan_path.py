"""Plan-Path for ablations: the team of the example, and agents that do the whole task alone.

    python -m examples.ablation.plan_path --out runs/ablation/plan_path    # base model, tasks, held-out tasks

The team has the prompts, rules and rewards of `examples/plan_path`. Its workflow here calls the OpenAI SDK itself
instead of running the LangGraph application, which costs less than half per call and samples the same tokens.
A single agent presses the controls itself. It sees the navigator's view, the driver's table, or both.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cotune
from examples.plan_path import base, grid, rewards
from examples.plan_path.grid import Cell, Grid

MAX_TOKENS = 6
"""The limit of the example's application."""

_at: dict[str, Cell] = {}
"""Where the agent is, by task id: a task is walked by one episode at a time."""


@cache
def _client() -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)


async def say(role: str, messages: list[dict[str, str]]) -> str:
    """One call of a role."""
    with cotune.role(role):
        reply = await _client().chat.completions.create(
            model=role, messages=messages, max_completion_tokens=MAX_TOKENS, temperature=1.0
        )
    return reply.choices[0].message.content or ""


def _outcome(board: Grid, start: Cell, end: Cell) -> dict[str, float]:
    return {"team": rewards.team_reward(board, start, end), "success": float(end == board.goal)}


@cotune.workflow
async def team(task: Mapping[str, Any]) -> dict[str, float]:
    """Navigator and driver, as in the example."""
    board, start = grid.grid_of(task), grid.cell_of(task["start"])
    at = start
    for _ in range(grid.ROUNDS):
        _at[task["id"]] = at
        message = await say("navigator", grid.navigator_messages(board, at))
        pressed = await say("driver", grid.driver_messages(board, message))
        at = grid.carry_out(board, at, grid.moves_of(board, pressed) or []).at
        if at == board.goal:
            break
    return _outcome(board, start, at)


@team.scorer("navigator")
def moves_said(candidate: Any, call: Any, task: Mapping[str, Any]) -> dict[str, float]:
    """As in the example."""
    return rewards.navigator_reward(grid.grid_of(task), _at[task["id"]], candidate.text)


def controls_pressed(candidate: Any, call: Any, task: Mapping[str, Any]) -> dict[str, float]:
    """As in the example."""
    return rewards.driver_reward(grid.grid_of(task), _at[task["id"]], candidate.text)


team.scorer("driver")(controls_pressed)

View = Callable[[Grid, Cell], str]


def table(board: Grid) -> str:
    """The driver's table."""
    return f"controls {grid.table(board)}"


VIEWS: dict[str, View] = {
    "navigator": lambda board, at: grid.view(board, at),
    "driver": lambda board, at: table(board),
    "everything": lambda board, at: f"{grid.view(board, at)}\n{table(board)}",
}
"""The views of a single agent."""


def solo_messages(view: str, board: Grid, at: Cell) -> list[dict[str, str]]:
    """Prompt of a single agent."""
    content = VIEWS[view](board, at)
    return [{"role": "system", "content": f"{grid.NAVIGATOR} {grid.DRIVER}"}, {"role": "user", "content": content}]


def alone(view: str) -> Any:
    """The workflow of a single agent with one of the views; its role has the view's name."""

    async def solo(task: Mapping[str, Any]) -> dict[str, float]:
        board, start = grid.grid_of(task), grid.cell_of(task["start"])
        at = start
        for _ in range(grid.ROUNDS):
            _at[task["id"]] = at
            pressed = await say(view, solo_messages(view, board, at))
            at = grid.carry_out(board, at, grid.moves_of(board, pressed) or []).at
            if at == board.goal:
                break
        return _outcome(board, start, at)

    solo.__name__ = f"alone_{view}"
    workflow = cotune.workflow(solo)
    workflow.scorer(view)(controls_pressed)
    return workflow


alone_navigator, alone_driver, alone_everything = map(alone, VIEWS)
WORKFLOWS: dict[str, Any] = {
    "team": team,
    "alone_navigator": alone_navigator,
    "alone_driver": alone_driver,
    "alone_everything": alone_everything,
}


def solo_demonstration(view: str) -> base.Demonstrator:
    """Return demonstrations for a single agent, as imperfect as the team's.

    Without the grid it makes random moves, without the table it presses the usual controls.
    """

    def demonstrate(rng: random.Random) -> base.Demonstration:
        board, at = base.scene(rng)
        moves = base.erring_moves(rng, board, at)
        if view == "driver":
            moves = rng.choices(list(grid.MOVES), k=len(moves))
        words = base.erring_controls(rng, board, moves, usual=view == "navigator")
        return solo_messages(view, board, at), base.spoil(rng, words)

    return demonstrate


DEMONSTRATORS: Sequence[base.Demonstrator] = (*base.TEAM, *(solo_demonstration(view) for view in VIEWS))
"""For the team and for every single agent, so that all rows start from one base model."""


def main() -> None:
    """Write the files for an ablation of Plan-Path: a base model, tasks.jsonl and held_out.jsonl."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation/plan_path"))
    parser.add_argument("--warm-up", type=int, default=520, help="steps of the base's warm-up (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=2048, help="tasks of training (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=300, help="(default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    base.build(options.out / "base", steps=options.warm_up, demonstrators=DEMONSTRATORS)
    for name, count, seed in (("tasks", options.tasks, 100), ("held_out", options.held_out, 900)):
        tasks = grid.make_tasks(count, seed)
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


if __name__ == "__main__":
    main()
