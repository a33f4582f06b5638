"""Applications of two to six roles that pass a code on, for planted faults in `benchmarks.blame_applications`.

Each is built with a framework as its users do: chains, a loop, parallel branches, a vote, tools; in LangGraph, AutoGen,
CrewAI and with the plain OpenAI SDK. A role's right answer follows from its messages, so an expert can give it. A run
succeeds if the code arrives.
"""

from __future__ import annotations

import asyncio
import operator
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-benchmarks")
os.environ.setdefault("OPENAI_API_KEY", "none")

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from crewai import LLM, Agent, Crew, Task
from crewai.events.utils.console_formatter import set_suppress_console_output
from crewai_core.lock_store import set_lock_backend
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

import cotune
from examples.gallery import warm

set_suppress_console_output(True)
_crewai_lock = threading.RLock()
# CrewAI's own lock is a file. A crew that waits for it sleeps a quarter of a second, and so does the event loop.
set_lock_backend(lambda name, timeout: _crewai_lock)
URL = "http://127.0.0.1:9/v1"
"""Nobody listens there: a responder answers, and the reference has an address of its own."""
CODE = re.compile(r"code:(\w+)")
model = ChatOpenAI(model="small", base_url=URL, api_key="none", max_retries=0)  # type: ignore[arg-type]
client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)


# The right answers, and wrong ones


def expert(messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """The right answer of a role, which its first message names."""
    role = _role(messages)
    texts = [str(message.get("content") or "") for message in messages[1:]]
    # A malformed answer of an earlier role has no code.
    codes = CODE.findall(" ".join(texts)) or ["none"]
    if role == "clerk" and not any(message["role"] == "tool" for message in messages):
        return warm.calls("look_up", key=re.findall(r"key:(\w+)", " ".join(texts))[-1])
    if role == "reviewer":
        return warm.says("accept" if codes[-2:-1] == codes[-1:] else "reject")
    if role == "judge":
        return warm.says(f"code:{Counter(codes).most_common(1)[0][0]}")
    if role == "join":
        return warm.says("code:" + "".join(codes))
    if role == "agree":
        return warm.says(f"code:{codes[-1] if codes[-2:-1] == codes[-1:] else 'none'}")
    return warm.says(f"code:{codes[-1]}")


def wrong(chance: random.Random, messages: Sequence[Mapping[str, Any]]) -> warm.Message:
    """An answer of the same form that is wrong."""
    right = expert(messages)
    if right.get("tool_calls"):
        return warm.calls("look_up", key=f"k{chance.randrange(1000)}")
    text = str(right["content"])
    if text in ("accept", "reject"):
        return warm.says("reject" if text == "accept" else "accept")
    return warm.says(f"code:x{chance.randrange(1000, 9999)}")


def tasks(count: int, seed: int) -> list[dict[str, str]]:
    """Codes to pass on."""
    chance = random.Random(seed)
    return [{"code": f"c{chance.randrange(1000, 9999)}"} for _ in range(count)]


def _role(messages: Sequence[Mapping[str, Any]]) -> str:
    """The role that the first message is for."""
    found = re.search(r"You are (\w+)", str(messages[0].get("content")))
    return found[1] if found else ""


# The applications


def _instructions(role: str) -> str:
    return f"You are {role}."


async def _node(role: str, text: str) -> str:
    """One request of a LangGraph node."""
    return str((await model.ainvoke([SystemMessage(_instructions(role)), HumanMessage(text)])).content)


class Passed(TypedDict):
    text: str


def _chain(roles: Sequence[str]) -> Any:
    """A LangGraph graph in which each node passes on the text of the one before."""
    builder = StateGraph(Passed)
    for role in roles:

        async def passes(state: Passed, role: str = role) -> Passed:
            return {"text": await _node(role, state["text"])}

        builder.add_node(role, passes)
    for before, after in zip([START, *roles], [*roles, END], strict=True):
        builder.add_edge(before, after)
    return builder.compile()


SIX = ("reader", "planner", "finder", "writer", "editor", "sender")
CHAIN = _chain(SIX)


@cotune.workflow
async def chain_of_six(task: Any) -> float:
    """LangGraph: six nodes one after the other."""
    state = await CHAIN.ainvoke({"text": f"code:{task['code']}"})
    return float(state["text"] == f"code:{task['code']}")


class Parts(TypedDict):
    code: str
    part: str
    said: Annotated[list[str], operator.add]


async def _worker(state: Parts) -> Any:
    return {"said": [await _node("worker", f"code:{state['part']}")]}


async def _join(state: Parts) -> Any:
    return {"said": [await _node("join", " ".join(state["said"]))]}


def _fan_out() -> Any:
    builder = StateGraph(Parts)
    builder.add_node("worker", _worker)
    builder.add_node("join", _join)
    parts = (slice(0, 2), slice(2, 4), slice(4, 5))
    builder.add_conditional_edges(
        START, lambda state: [Send("worker", {**state, "part": state["code"][part]}) for part in parts], ["worker"]
    )
    builder.add_edge("worker", "join")
    builder.add_edge("join", END)
    return builder.compile()


FAN_OUT = _fan_out()


@cotune.workflow
async def fan_out(task: Any) -> float:
    """LangGraph: three parallel workers by Send, and a node that joins their parts."""
    state = await FAN_OUT.ainvoke({"code": task["code"], "part": "", "said": []})
    return float(state["said"][-1] == f"code:{task['code']}")


class Draft(TypedDict):
    code: str
    draft: str
    opinion: str
    rounds: int


async def _drafts(state: Draft) -> Any:
    draft = await _node("writer", f"round {state['rounds']} code:{state['code']}")
    return {"draft": draft, "rounds": state["rounds"] + 1}


async def _reviews(state: Draft) -> Any:
    return {"opinion": await _node("reviewer", f"asked code:{state['code']}, draft {state['draft']}")}


def _loop() -> Any:
    builder = StateGraph(Draft)
    builder.add_node("writer", _drafts)
    builder.add_node("reviewer", _reviews)
    builder.add_edge(START, "writer")
    builder.add_edge("writer", "reviewer")
    builder.add_conditional_edges(
        "reviewer", lambda state: END if state["opinion"] == "accept" or state["rounds"] > 2 else "writer"
    )
    return builder.compile()


LOOP = _loop()


@cotune.workflow
async def loop(task: Any) -> float:
    """LangGraph: a writer, and a reviewer that sends it back up to twice."""
    state = await LOOP.ainvoke({"code": task["code"], "draft": "", "opinion": "", "rounds": 0})
    return float(state["draft"] == f"code:{task['code']}")


SHELF: dict[str, str] = {}
"""What the tool finds, by key."""


@tool
def look_up(key: str) -> str:
    """Look up the code of a key."""
    return f"code:{SHELF.get(key, 'missing')}"


CLERK = create_agent(model, [look_up], name="clerk", system_prompt=_instructions("clerk"))


@cotune.workflow
async def clerk_with_tool(task: Any) -> float:
    """LangGraph: an agent with a tool, and a node that passes its answer on."""
    key = f"k{task['code'][1:]}"
    SHELF[key] = task["code"]
    state = await CLERK.ainvoke({"messages": [HumanMessage(f"key:{key}")]})
    with cotune.role("writer"):
        return float(await _node("writer", str(state["messages"][-1].content)) == f"code:{task['code']}")


autogen_model = OpenAIChatCompletionClient(
    model="small",
    base_url=URL,
    api_key="none",
    max_retries=0,
    model_info=ModelInfo(
        vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False
    ),
)


def _autogen(role: str) -> AssistantAgent:
    return AssistantAgent(role, autogen_model, system_message=_instructions(role))


@cotune.workflow
async def flow_side_by_side(task: Any) -> float:
    """AutoGen: a start, two agents side by side, and one that goes on only if they agree."""
    members = [_autogen("start"), _autogen("left"), _autogen("right"), _autogen("agree")]
    start, left, right, end = members
    builder = DiGraphBuilder()
    for member in members:
        builder.add_node(member)
    builder.add_edge(start, left).add_edge(start, right).add_edge(left, end).add_edge(right, end)
    result = await GraphFlow(members, builder.build()).run(task=f"code:{task['code']}")
    return float(result.messages[-1].to_text() == f"code:{task['code']}")


@cotune.workflow
async def flow_of_three(task: Any) -> float:
    """AutoGen: three agents one after the other, each of which reads all that was said."""
    members = [_autogen("reader"), _autogen("writer"), _autogen("sender")]
    builder = DiGraphBuilder()
    for member in members:
        builder.add_node(member)
    builder.add_edge(members[0], members[1]).add_edge(members[1], members[2])
    result = await GraphFlow(members, builder.build()).run(task=f"code:{task['code']}")
    return float(result.messages[-1].to_text() == f"code:{task['code']}")


llm = LLM(model="openai/gpt-4o-mini", base_url=URL, api_key="none", max_retries=0)


def _crew_agent(role: str) -> Agent:
    return Agent(role=role, goal="pass the code on", backstory="A member of the crew.", llm=llm)


@cotune.workflow
async def crew_of_three(task: Any) -> float:
    """CrewAI: three tasks, each with the answer of the one before."""
    reader, writer, sender = _crew_agent("reader"), _crew_agent("writer"), _crew_agent("sender")
    first = Task(description=f"Read code:{task['code']}", expected_output="it", agent=reader)
    second = Task(description="Write it", expected_output="it", agent=writer, context=[first])
    third = Task(description="Send it", expected_output="it", agent=sender, context=[second])
    said = await Crew(agents=[reader, writer, sender], tasks=[first, second, third]).kickoff_async()
    return float(said.raw == f"code:{task['code']}")


@cotune.workflow
async def crew_side_by_side(task: Any) -> float:
    """CrewAI: two tasks at the same time, and one that joins their answers."""
    left, right, join = _crew_agent("left"), _crew_agent("right"), _crew_agent("join")
    code = task["code"]
    first = Task(description=f"Read code:{code[:2]}", expected_output="it", agent=left, async_execution=True)
    second = Task(description=f"Read code:{code[2:]}", expected_output="it", agent=right, async_execution=True)
    third = Task(description="Join them", expected_output="it", agent=join, context=[first, second])
    said = await Crew(agents=[left, right, join], tasks=[first, second, third]).kickoff_async()
    return float(said.raw == f"code:{code}")


async def _ask(role: str, text: str) -> str:
    with cotune.role(role):
        messages: Any = [{"role": "system", "content": _instructions(role)}, {"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="small", messages=messages)
    return reply.choices[0].message.content or ""


@cotune.workflow
async def vote(task: Any) -> float:
    """OpenAI SDK: three solvers at the same time, and a judge that takes the majority."""
    said = await asyncio.gather(*(_ask(role, f"code:{task['code']}") for role in ("first", "second", "third")))
    return float(await _ask("judge", " ".join(said)) == f"code:{task['code']}")


@dataclass(frozen=True)
class Structure:
    """An application with its tasks and its right and wrong answers, in the form of a module of the gallery."""

    solve: Any
    tasks = staticmethod(tasks)
    expert = staticmethod(expert)
    wrong = staticmethod(wrong)


ROLES: Mapping[str, Sequence[str]] = {
    "chain_of_six": SIX,
    "fan_out": ("worker", "join"),
    "loop": ("writer", "reviewer"),
    "clerk_with_tool": ("clerk", "writer"),
    "flow_side_by_side": ("start", "left", "right", "agree"),
    "flow_of_three": ("reader", "writer", "sender"),
    "crew_of_three": ("reader", "writer", "sender"),
    "crew_side_by_side": ("left", "right", "join"),
    "vote": ("first", "second", "third", "judge"),
}
STRUCTURES = {name: Structure(globals()[name]) for name in ROLES}
