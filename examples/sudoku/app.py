"""A LangGraph application: a planner names the cells to fill next, and a filler fills them, by moves or by a program.

Fills that break a rule are refused and named to both. They have up to four turns.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.sudoku.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from examples.code.programs import sandbox
from examples.sudoku.board import Board, filled, fills_of, text_of
from examples.sudoku.verifier import CELLS, solved

TURNS = 4
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
PLANNER = f"Name up to {CELLS} empty cells of the Sudoku that only one value fits, such as: r1c2 r3c4"
FILLER = (
    "Fill cells of the Sudoku, such as: r1c2=3 r3c4=1\nOr write, between ```python and ``` marks, a program that reads "
    "the board and prints that."
)


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


planner_model = model("planner")
filler_model = model("filler")


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
    """Fill cells; what breaks a rule is refused."""
    reply = await filler_model.ainvoke(messages(FILLER, state, f"Cells: {state['named']}"))
    board = board_of(state)
    fills = await asyncio.to_thread(fills_of, reply.text, board, sandbox())
    after, refused = (board, ["no fills were read"]) if fills is None else filled(state["puzzle"], board, fills)
    return {"board": after, "refused": refused, "turns": state.get("turns", 0) + 1}


def onward(state: State) -> str:
    """Another turn, until the puzzle is solved or the turns are over."""
    return END if solved(state["puzzle"], state["board"]) or state["turns"] >= TURNS else "planner"


builder = StateGraph(State)
builder.add_node("planner", planner)
builder.add_node("filler", filler)
builder.add_edge(START, "planner")
builder.add_edge("planner", "filler")
builder.add_conditional_edges("filler", onward, ["planner", END])
graph = builder.compile()


async def main() -> None:
    """Solve puzzles with whatever OPENAI_BASE_URL points at, and print how many are solved."""
    from examples.sudoku.tasks import make_tasks

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
