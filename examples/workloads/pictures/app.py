"""A LangGraph application: a describer looks at a picture of a grid, and a solver, who does not see it, walks.

The describer says where the goal is and where walls are; in each turn the solver says a move or two. The same
with one agent, which sees the picture and walks, is `single_graph`.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.pictures.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.plan_path.grid import SIZE, Board, Cell, carry_out, cell_of, grid_of, moves_in
from examples.workloads.pictures.board import data_url, drawn

SPARE = 2
"""Turns beyond the cells of a side."""
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
DESCRIBER = (
    "You are blue, the goal is green, walls are black. Say how far the goal is, and where a wall or the edge is beside "
    "you, such as: goal right=2 down=1 walls up left"
)
SOLVER = "Say one or two moves towards the goal, of up, right, down, left, such as: right up"
ALONE = f"You are blue, the goal is green, walls are black. {SOLVER}"


class State(TypedDict, total=False):
    """State of a walk: the task, the cell the agent is on, what the describer said last, turns, whether it arrived."""

    task: Board
    at: list[int]
    description: str
    turns: int
    reached: bool


def model(role: str) -> ChatOpenAI:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=1, max_tokens=32, api_key=API_KEY)


describer_model = model("describer")
solver_model = model("solver")
agent_model = model("agent")


def position(state: State) -> Cell:
    """Where the agent is."""
    return cell_of(state.get("at") or state["task"]["start"])


def looking(state: State, prompt: str) -> list[dict[str, Any]]:
    """The messages to a role that sees the picture."""
    picture = {"type": "image_url", "image_url": {"url": data_url(drawn(grid_of(state["task"]), position(state)))}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": prompt}]}]


def told(description: str) -> list[dict[str, Any]]:
    """The messages to the solver."""
    return [{"role": "system", "content": SOLVER}, {"role": "user", "content": description}]


async def describer(state: State) -> State:
    """Say what is in the picture."""
    reply = await describer_model.ainvoke(looking(state, DESCRIBER))
    return {"description": reply.text.strip()}


async def solver(state: State) -> State:
    """Move by the description."""
    reply = await solver_model.ainvoke(told(state["description"]))
    return walked(reply.text, state)


async def agent(state: State) -> State:
    """Do the whole thing alone."""
    reply = await agent_model.ainvoke(looking(state, ALONE))
    return walked(reply.text, state)


def walked(message: str, state: State) -> State:
    """A turn with its moves; anything but one or two moves stays where it is."""
    done = carry_out(grid_of(state["task"]), position(state), moves_in(message) or [])
    return {"at": list(done.at), "turns": state.get("turns", 0) + 1, "reached": done.reached}


def onward(state: State) -> bool:
    """Whether there is another turn: until the goal is reached or the turns are over."""
    return not state["reached"] and state["turns"] < state["task"]["size"] + SPARE


builder = StateGraph(State)
builder.add_node("describer", describer)
builder.add_node("solver", solver)
builder.add_edge(START, "describer")
builder.add_edge("describer", "solver")
builder.add_conditional_edges("solver", onward, {True: "describer", False: END})
graph = builder.compile()

single = StateGraph(State)
single.add_node("agent", agent)
single.add_edge(START, "agent")
single.add_conditional_edges("agent", onward, {True: "agent", False: END})
single_graph = single.compile()


async def main() -> None:
    """Walk grids with whatever OPENAI_BASE_URL points at, and print how many goals were reached."""
    from examples.workloads.pictures.tasks import make_tasks

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=SIZE, help="cells of a side (default: %(default)s)")
    options = parser.parse_args()
    tasks = make_tasks(options.tasks, options.seed, size=options.size)
    states = await graph.abatch([{"task": task} for task in tasks], {"max_concurrency": 16})
    for task, state in zip(tasks, states, strict=True):
        print(f"{task['id']}: {'reached' if state['reached'] else 'not reached'} in {state['turns']} turns")
    print(f"{sum(state['reached'] for state in states)} of {len(tasks)} goals were reached")


if __name__ == "__main__":
    asyncio.run(main())
