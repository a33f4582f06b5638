"""A LangGraph application: a planner names the cells to fill next, and a filler fills them, by moves or by a program.

Fills that break a rule are refused and named to both. They have up to four turns; so has a single agent, which fills
cells by itself, with programs or without.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.sudoku.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.workloads.sudoku.board import Board, Fill, filled, fills_in, fills_of, text_of
from examples.workloads.sudoku.verifier import CELLS, solved

TURNS = 4
UNREAD = "no fills were read"
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
PLANNER = f"Name up to {CELLS} empty cells of the Sudoku that only one value fits, such as: r1c2 r3c4"
FILLS = "such as: r1c2=3 r3c4=1"
PROGRAM = "Or write, between ```python and ``` marks, a program that reads the board and prints that."
FILLER = f"Fill cells of the Sudoku, {FILLS}\n{PROGRAM}"
WITHOUT_TOOL = f"Solve the Sudoku: fill cells that only one value fits, {FILLS}"
ALONE = f"{WITHOUT_TOOL}\n{PROGRAM}"


class State(TypedDict, total=False):
    """State of a task: the clues, the board as it is, what the planner named, fills refused in the last turn, turns."""

    puzzle: Board
    board: Board
    named: str
    refused: list[str]
    turns: int


def model(role: str) -> ChatOpenAI:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=1, api_key=API_KEY)


planner_model, filler_model, agent_model = map(model, ("planner", "filler", "agent"))


def messages(system: str, state: State, *more: str) -> list[dict[str, str]]:
    """A role's prompt: the board, what was refused, and more."""
    refused = [f"Refused: {'; '.join(state['refused'])}"] if state.get("refused") else []
    content = "\n".join([text_of(board_of(state)), *refused, *more])
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def board_of(state: State) -> Board:
    """The board as it is: before the first fill, the clues."""
    return state.get("board") or state["puzzle"]


async def planner(state: State) -> State:
    """Name cells."""
    reply = await planner_model.ainvoke(messages(PLANNER, state))
    return {"named": reply.text.strip()}


async def filler(state: State) -> State:
    """Fill cells."""
    reply = await filler_model.ainvoke(messages(FILLER, state, f"Cells: {state['named']}"))
    return carried_out(await filled_in(reply.text, state), state)


async def agent(state: State) -> State:
    """Do the whole thing alone."""
    reply = await agent_model.ainvoke(messages(ALONE, state))
    return carried_out(await filled_in(reply.text, state), state)


async def agent_without_tool(state: State) -> State:
    """Do the whole thing alone, without programs."""
    reply = await agent_model.ainvoke(messages(WITHOUT_TOOL, state))
    return carried_out(fills_in(reply.text), state)


async def filled_in(message: str, state: State) -> list[Fill] | None:
    """The fills of a message or of its program."""
    return await asyncio.to_thread(fills_of, message, board_of(state))


def carried_out(fills: list[Fill] | None, state: State) -> State:
    """A turn with its fills; what breaks a rule is refused."""
    board = board_of(state)
    after, refused = (board, [UNREAD]) if fills is None else filled(state["puzzle"], board, fills)
    return {"board": after, "refused": refused, "turns": state.get("turns", 0) + 1}


def onward(state: State) -> bool:
    """Whether there is another turn: until the puzzle is solved or the turns are over."""
    return not solved(state["puzzle"], state["board"]) and state["turns"] < TURNS


builder = StateGraph(State)
builder.add_node("planner", planner)
builder.add_node("filler", filler)
builder.add_edge(START, "planner")
builder.add_edge("planner", "filler")
builder.add_conditional_edges("filler", onward, {True: "planner", False: END})
graph = builder.compile()


def single(node: Callable[[State], Awaitable[State]]) -> Any:
    """The graph of a single agent."""
    alone = StateGraph(State)
    alone.add_node("agent", node)
    alone.add_edge(START, "agent")
    alone.add_conditional_edges("agent", onward, {True: "agent", False: END})
    return alone.compile()


single_graph = single(agent)
graph_without_tool = single(agent_without_tool)


async def main() -> None:
    """Solve puzzles with whatever OPENAI_BASE_URL points at, and print how many are solved."""
    from examples.workloads.sudoku.tasks import make_tasks

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=4, choices=(4, 9))
    options = parser.parse_args()
    tasks = make_tasks(options.tasks, options.seed, size=options.size)
    states = await graph.abatch([{"puzzle": task["puzzle"]} for task in tasks], {"max_concurrency": 16})
    for task, state in zip(tasks, states, strict=True):
        print(f"{task['id']}, {state['turns']} turns:\n{text_of(state['board'])}")
    print(f"{sum(solved(s['puzzle'], s['board']) for s in states)} of {len(tasks)} are solved")


if __name__ == "__main__":
    asyncio.run(main())
