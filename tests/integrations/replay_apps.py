"""Applications of the three frameworks and of the plain SDK to record and run again: parallel parts, tools, nesting
and streams, by task.

Their prompts contain what was said before and in which order it came, as the frameworks put it together.
"""

from __future__ import annotations

import asyncio
import operator
import os
from typing import Annotated, Any, TypedDict

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from crewai import LLM, Agent, Crew
from crewai import Task as CrewTask
from crewai.tools import tool as crew_tool
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.types import Send

import cotune
from tests.integrations.autogen_models import autogen_client
from tests.integrations.graphs import chain

URL = "http://127.0.0.1:9/v1"
model = ChatOpenAI(model="m", base_url=URL, api_key="none", max_retries=0)
client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
plain = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
llm = LLM(model="openai/gpt-4o-mini", base_url=URL, api_key="none", max_retries=0)

WORDS = {"system": "Be brief.", "last": "Be brief."}
"""Part of every prompt, and of that of the role which speaks last; a test changes them."""


@tool
def look(q: str) -> str:
    """Look something up."""
    return f"found {q}"


class Parts(TypedDict):
    question: str
    part: int
    said: Annotated[list[str], operator.add]


async def _worker(state: Any) -> Any:
    asked = f"{WORDS['system']} part {state['part']} of {state['question']}"
    return {"said": [str((await model.ainvoke(asked)).content)]}


def _fan_out(state: Any) -> list[Send]:
    return [Send("worker", {"question": state["question"], "part": part}) for part in range(3)]


async def _join(state: Any) -> Any:
    streamed = [str(part.content) async for part in model.astream(f"{WORDS['last']} join {' | '.join(state['said'])}")]
    return {"said": ["".join(streamed)]}


def _parallel() -> Any:
    builder = StateGraph(Parts)
    builder.add_node("worker", _worker)
    builder.add_node("join", _join)
    builder.add_conditional_edges(START, _fan_out, ["worker"])
    builder.add_edge("worker", "join")
    return builder.compile()


async def _speaks(state: Any) -> Any:
    return {"messages": [await model.ainvoke([HumanMessage(WORDS["system"]), *state["messages"]])]}


async def _closes(state: Any) -> Any:
    return {"messages": [await model.ainvoke([HumanMessage(WORDS["last"]), *state["messages"]])]}


PARALLEL = _parallel()
AGENT = create_agent(model, [look], name="helper")
TEAM = chain(("work", _speaks), ("check", _speaks))
NESTED = chain(("plan", _speaks), ("team", TEAM), ("agent", AGENT), ("close", _closes))


async def langgraph(task: Any) -> float:
    """A fan-out of three and what joins them, streamed; or a graph in a graph and an agent with a tool."""
    if task["n"] % 2:
        state = await PARALLEL.ainvoke({"question": f"q{task['n']}", "said": []})
        return len(state["said"][-1]) / 100
    state = {}
    asked = {"messages": [HumanMessage(f"q{task['n']}")]}
    async for mode, part in NESTED.astream(asked, stream_mode=["values", "messages"]):
        state = part if mode == "values" else state
    return len(state["messages"]) / 100


def agent(name: str, **options: Any) -> AssistantAgent:
    words = WORDS["last" if name in ("end", "says") else "system"]
    return AssistantAgent(
        name,
        autogen_client(base_url=URL, api_key="none", max_retries=0),
        system_message=f"{words} I am {name}.",
        **options,
    )


async def autogen(task: Any) -> float:
    """A flow whose middle runs side by side; or a pair, one of which has an agent as its tool, streamed."""
    if task["n"] % 2:
        members = [agent(name) for name in ("start", "left", "right", "end")]
        builder = DiGraphBuilder()
        for member in members:
            builder.add_node(member)
        start, left, right, end = members
        builder.add_edge(start, left).add_edge(start, right).add_edge(left, end).add_edge(right, end)
        result = await GraphFlow(members, builder.build()).run(task=f"q{task['n']}")
    else:
        expert = AgentTool(agent("expert"), return_value_as_last_message=True)
        pair = [agent("asks", tools=[expert], reflect_on_tool_use=True), agent("says", model_client_stream=True)]
        result = await RoundRobinGroupChat(pair, max_turns=2).run(task=f"q{task['n']}")
    return len(result.messages) / 100


@crew_tool("look")
def find(q: str) -> str:
    """Look something up."""
    return f"found {q}"


async def crewai(task: Any) -> float:
    """Two tasks side by side, one with a tool, and one that has the answers of both."""
    one, two, join = (
        Agent(role=role, goal="g", backstory=WORDS["last" if role == "Join" else "system"], llm=llm, tools=tools)
        for role, tools in (("One", [find]), ("Two", []), ("Join", []))
    )

    def given(text: str, by: Agent, **options: Any) -> CrewTask:
        return CrewTask(description=f"{text} q{task['n']}", expected_output="e", agent=by, **options)

    tasks = [given("a", one, async_execution=True), given("b", two, async_execution=True)]
    made = Crew(agents=[one, two, join], tasks=[*tasks, given("c", join, context=tasks)])
    return len((await made.kickoff_async()).raw) / 100


async def _asks(role: str, messages: list[Any], **options: Any) -> Any:
    with cotune.role(role):
        made = await client.chat.completions.create(model="m", messages=messages, **options)
    return made.choices[0].message


def _in_thread(text: str) -> str:
    """A plain function with a client of its own."""
    with cotune.role("thread"):
        made = plain.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return str(made.choices[0].message.content)


async def sdk(task: Any) -> float:
    """A role that uses a tool; three side by side, one of them in a thread; and one, streamed, that has all of it."""
    messages: list[Any] = [{"role": "system", "content": WORDS["system"]}, {"role": "user", "content": f"q{task['n']}"}]
    asked = await _asks("helper", messages, tools=[LOOK])
    messages.append(asked.model_dump(exclude_none=True))
    for use in asked.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": use.id, "content": f"found {use.function.arguments}"})
    helped = (await _asks("helper", messages)).content
    sides = [_asks("side", [{"role": "user", "content": f"side {side} of {helped}"}]) for side in "ab"]
    *said, last = await asyncio.gather(*sides, asyncio.to_thread(_in_thread, f"{WORDS['system']} {helped}"))
    heard = " ".join([*(str(one.content) for one in said), last])
    with cotune.role("last"):
        parts = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"{WORDS['last']} {heard}"}], stream=True
        )
        streamed = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
    return len(streamed) / 100


APPLICATIONS = {"langgraph": langgraph, "autogen": autogen, "crewai": crewai, "sdk": sdk}
