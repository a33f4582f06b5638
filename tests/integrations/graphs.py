"""Small LangGraph applications to record, and what answers them."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

HELLO: Any = {"messages": [HumanMessage("hello")]}
URL = "http://127.0.0.1:9/v1"
model = ChatOpenAI(model="m", base_url=URL, api_key="none", max_retries=0)
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


def chain(*nodes, name=None, state=MessagesState, **options):
    """A graph of nodes one after the other: functions by their own name, others as (name, node)."""
    builder, last = StateGraph(state), START
    for node in nodes:
        label, run = node if isinstance(node, tuple) else (node.__name__, node)
        builder.add_node(label, run)
        builder.add_edge(last, label)
        last = label
    return builder.compile(name=name, **options)


def says(state):
    return {"messages": [model.invoke(state["messages"])]}


async def asays(state):
    return {"messages": [await model.ainvoke(state["messages"])]}


def running(graph, way="invoke", given=None, config=None):
    """A workflow that runs the graph once: by `invoke` or `ainvoke`, or streamed in a mode (`a` before it: async)."""
    given = given or HELLO

    def run(task):
        if way == "invoke":
            graph.invoke(given, config)
        else:
            list(graph.stream(given, config, stream_mode=way))
        return 1

    async def run_async(task):
        if way == "ainvoke":
            await graph.ainvoke(given, config)
        else:
            [part async for part in graph.astream(given, config, stream_mode=way.removeprefix("a"), subgraphs=True)]
        return 1

    return run_async if way.startswith("a") else run


def node_of(fn, name="node"):
    """A workflow of one node that calls `fn` and forgets what it returns."""
    return running(chain((name, lambda state: fn() and {})))


def scripted(*first):
    """Says what is scripted for a role's first turns, then its name."""
    script = dict(first)

    def reply(call):
        turns = script.get(call.role, ())
        return turns[call.turn] if call.turn < len(turns) else f"{call.role} {call.turn}"

    return reply


@tool
def look(q: str) -> str:
    """Look something up."""
    return "42"
