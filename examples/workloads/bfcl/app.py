"""A LangGraph application: a chooser names the next tool for a request, a caller writes its call, until all is done.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.bfcl.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

STEPS = 4
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
CHOOSER: list[dict[str, str]] = [
    {"role": "system", "content": "Name the tool of the next step, or say done."},
    {"role": "user", "content": "Tools: cat(file_name), mkdir(dir_name), rm(file_name)\nMake a folder for photos."},
    {"role": "assistant", "content": "mkdir"},
    {"role": "user", "content": "Tools: ls(), rm(file_name)\nDelete a.txt.\nrm(file_name='a.txt') -> null"},
    {"role": "assistant", "content": "done"},
]
CALLER: list[dict[str, str]] = [
    {"role": "system", "content": "Write the call of the tool."},
    {"role": "user", "content": "mkdir(dir_name): Create a new directory.\nMake a folder for photos."},
    {"role": "assistant", "content": "mkdir(dir_name='photos')"},
]


class State(TypedDict, total=False):
    """State of a request: its text, the calls so far with their results, and the tool that was chosen."""

    request: str
    so_far: list[str]
    tool: str


def model(role: str, **settings: Any) -> ChatOpenAI:
    """The chat model that plays a role; served under the role's name."""
    return ChatOpenAI(model=role, temperature=1, api_key=API_KEY, **settings)


chooser_model = model("chooser", max_tokens=12, stop=["\n", "("])
caller_model = model("caller", max_tokens=48, stop=["\n"])


async def chooser(state: State, config: RunnableConfig) -> State:
    """Name the next tool."""
    tools = ", ".join(config["configurable"]["desk"].signatures)
    content = "\n".join([f"Tools: {tools}", state["request"], *state.get("so_far", [])])
    reply = await chooser_model.ainvoke([*CHOOSER, {"role": "user", "content": content}])
    return {"tool": reply.text.strip()}


async def caller(state: State, config: RunnableConfig) -> State:
    """Write its call, and make it."""
    desk = config["configurable"]["desk"]
    content = "\n".join([desk.describe(state["tool"]), state["request"], *state.get("so_far", [])])
    reply = await caller_model.ainvoke([*CALLER, {"role": "user", "content": content}])
    call = reply.text.strip()
    return {"so_far": [*state.get("so_far", []), f"{call} -> {desk.execute(call)}"]}


def onward(state: State, config: RunnableConfig) -> str:
    """To the caller with a tool; what is none, `done` among them, ends the request."""
    known = config["configurable"]["desk"].describe(state["tool"])
    return "caller" if known and len(state.get("so_far", [])) < STEPS else END


builder = StateGraph(State)
builder.add_node("chooser", chooser)
builder.add_node("caller", caller)
builder.add_edge(START, "chooser")
builder.add_conditional_edges("chooser", onward, ["caller", END])
builder.add_edge("caller", "chooser")
graph = builder.compile()


async def main() -> None:
    """Do held-out requests with whatever OPENAI_BASE_URL points at, and print the calls that are made."""
    from examples.workloads.bfcl.tasks import make_tasks, open_desk

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=3)
    for task in make_tasks("turns", held_out=True)[: parser.parse_args().tasks]:
        desk = open_desk(task)
        for request in task["requests"]:
            state = await graph.ainvoke({"request": request}, {"configurable": {"desk": desk}})
            print(request, *state.get("so_far", ["no call"]), sep="\n  ")


if __name__ == "__main__":
    asyncio.run(main())
