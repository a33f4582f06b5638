"""A LangGraph application: a navigator and a driver walk a grid together, and neither can do it alone.

The navigator sees the way to the goal and the walls near it, but not the controls. The driver sees the controls, but
not the grid. Up to five times the navigator says a move or two and the driver presses controls.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.plan_path.app --tasks 3
"""

from __future__ import annotations

import argparse
import os
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.plan_path.grid import (
    ROUNDS,
    Board,
    carry_out,
    cell_of,
    driver_messages,
    grid_of,
    make_tasks,
    moves_of,
    navigator_messages,
)

TEMPERATURE = float(os.environ.get("PLAN_PATH_TEMPERATURE", "1"))
API_KEY = os.environ.get("OPENAI_API_KEY", "none")


class State(TypedDict, total=False):
    """State of a walk: the task, the cell the agent is on, the navigator's last message, and turns taken."""

    task: Board
    at: list[int]
    message: str
    rounds: int
    reached: bool


def model(role: str) -> Any:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=TEMPERATURE, max_tokens=6, api_key=API_KEY)


navigator_model = model("navigator")
driver_model = model("driver")


async def navigator(state: State) -> State:
    """Say a move or two."""
    reply = await navigator_model.ainvoke(navigator_messages(grid_of(state["task"]), position(state)))
    return {"message": reply.text}


async def driver(state: State) -> State:
    """Press the controls, and move."""
    grid, at = grid_of(state["task"]), position(state)
    reply = await driver_model.ainvoke(driver_messages(grid, state["message"]))
    effect = carry_out(grid, at, moves_of(grid, reply.text) or [])
    return {"at": list(effect.at), "rounds": state.get("rounds", 0) + 1, "reached": effect.reached}


def position(state: State) -> tuple[int, int]:
    """The cell the agent is on: the start, before anybody moved."""
    return cell_of(state.get("at") or state["task"]["start"])


def onward(state: State) -> str:
    """Another turn, until the goal is reached or the turns are over."""
    return END if state["reached"] or state["rounds"] >= ROUNDS else "navigator"


builder = StateGraph(State)
builder.add_node("navigator", navigator)
builder.add_node("driver", driver)
builder.add_edge(START, "navigator")
builder.add_edge("navigator", "driver")
builder.add_conditional_edges("driver", onward, ["navigator", END])
graph = builder.compile()


async def main() -> None:
    """Walk some tasks against whatever OPENAI_BASE_URL points at, and print how many reached the goal."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    states = await graph.abatch([{"task": task} for task in make_tasks(options.tasks, options.seed)])
    for state in states:
        print(f"{state['task']['id']}: {'reached' if state['reached'] else 'lost'} after {state['rounds']} turns")
    print(f"{sum(s['reached'] for s in states)} of {len(states)} reached the goal")


if __name__ == "__main__":
    import asyncio

    asyncio.run(main())
