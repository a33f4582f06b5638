"""What real AutoGen applications do to a recorder: threads, retries, other frameworks inside, swallowed errors."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import (
    AgentId,
    CancellationToken,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)
from autogen_core.models import UserMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from openai import AsyncOpenAI

import cotune
from cotune.integrations.apps.activation import activate
from cotune.records.structs import Message
from tests.integrations.autogen_models import autogen_client
from tests.integrations.provider import Provider, json_reply, said
from tests.integrations.recorded import Recorded, Sink, asks, episode, tool_call

activate()


def agent(name: str, **options: Any) -> AssistantAgent:
    return AssistantAgent(
        name, options.pop("model", None) or autogen_client(), system_message=f"I am {name}.", **options
    )


def pair(turns: int = 2) -> RoundRobinGroupChat:
    return RoundRobinGroupChat([agent("a"), agent("b")], max_turns=turns)


class State(TypedDict):
    text: str


def graph_of(node: Any, name: str) -> Any:
    builder = StateGraph(State)
    builder.add_node(name, node)
    builder.add_edge(START, name)
    return builder.compile()


def test_a_team_inside_a_node_and_the_node_after_it(nowhere: None, record: Recorded):
    plain = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")

    async def draft(state: State) -> State:
        for _ in range(2):
            await plain.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}])
            await pair().run(task=state["text"])
        return {"text": (await ChatOpenAI(model="l").ainvoke("y")).text}

    graph = graph_of(draft, "draft")

    async def solve(task: Any) -> float:
        return float(len((await graph.ainvoke({"text": "hi"}))["text"]))

    record(solve, lambda call: "x")
    assert record.roles == ["draft", "a", "b", "draft", "a", "b", "draft"]


def test_a_graph_inside_a_tool_of_an_agent(nowhere: None, record: Recorded):
    plain = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")

    async def write(state: State) -> State:
        await plain.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}])
        return {"text": (await ChatOpenAI(model="l").ainvoke("y")).text}

    graph = graph_of(write, "write")

    async def look(q: str) -> str:
        """Look something up."""
        found = (await graph.ainvoke({"text": q}))["text"]
        await plain.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}])
        return found

    async def solve(task: Any) -> float:
        await agent("boss", tools=[look], reflect_on_tool_use=True).run(task="hi")
        return 1.0

    record(solve, lambda call: asks(tool_call("look", {"q": "x"})) if call.step == 0 else "x")
    assert record.roles == ["boss", "write", "write", "boss/look", "boss"]


def test_an_agent_in_a_tool_in_a_graph_in_a_team(nowhere: None, record: Recorded):
    async def node(state: State) -> State:
        return {"text": (await agent("inner").run(task=state["text"])).messages[-1].content}

    graph = graph_of(node, "node")

    async def look(q: str) -> str:
        """Look something up."""
        return (await graph.ainvoke({"text": q}))["text"]

    async def solve(task: Any) -> float:
        boss = agent("boss", tools=[look], reflect_on_tool_use=True)
        await RoundRobinGroupChat([boss, agent("last")], max_turns=2).run(task="hi")
        return 1.0

    record(solve, lambda call: asks(tool_call("look", {"q": "x"})) if call.step == 0 else "x")
    assert record.roles == ["boss", "inner", "boss", "last"]


def test_the_override_wins_over_agents(nowhere: None, record: Recorded):
    async def solve(task: Any) -> float:
        with cotune.role("mine"):
            await pair().run(task="hi")
        return 1.0

    assert record(solve, lambda call: f"said {call.step}").live.warnings == {}
    assert record.roles == ["mine", "mine"]
    assert record.calls[1].parents == (record.calls[0].id,)


def test_sync_workflows_and_event_loops_in_threads(nowhere: None, record: Recorded):
    def solve(task: Any) -> float:
        def one(i: int) -> int:
            return len(asyncio.run(pair().run(task=f"task {i}")).messages)

        with ThreadPoolExecutor(4) as pool:
            return float(sum(pool.map(one, range(4))))

    assert record(solve, lambda call: call.role).rewards == {"team": 12.0}
    assert sorted(record.roles) == ["a"] * 4 + ["b"] * 4
    assert [len(call.parents) for call in record.calls if call.role == "b"] == [1] * 4


def test_the_sdks_retries_are_one_call_and_the_applications_are_more(provider: Provider, record: Recorded):
    provider.reply = lambda body, n: json_reply({"error": "busy"}, 503) if n == 0 else said(body)

    async def solve(task: Any) -> float:
        writer = agent("writer", model=autogen_client(max_retries=1))
        for _ in range(2):
            await writer.run(task="hi")
        return 1.0

    record(solve)
    assert [(call.role, call.turn, len(call.attempts)) for call in record.calls] == [("writer", 0, 1), ("writer", 1, 0)]
    assert len(provider.requests) == 3


def test_failures_that_the_application_swallows_are_counted(provider: Provider, record: Recorded):
    provider.reply = lambda body, n: json_reply({"error": "no"}, 400)

    async def solve(task: Any) -> float:
        done = await asyncio.gather(*(pair().run(task="hi") for _ in range(3)), return_exceptions=True)
        return float(sum(isinstance(result, RuntimeError) for result in done))

    outcome = record(solve)
    assert (outcome.rewards, outcome.live.failures, record.roles) == ({"team": 3.0}, {"error": 3}, ["a", "a", "a"])


def test_parallel_tool_calls_of_agents_in_functions(nowhere: None, record: Recorded):
    async def ask(who: str) -> str:
        """Ask somebody."""
        return (await agent(who).run(task=f"for {who}")).messages[-1].content

    async def reply(call: Any) -> Any:
        if call.step == 0:
            return asks(*(tool_call("ask", {"who": who}, f"c{who}") for who in ("x", "y", "z")))
        await asyncio.sleep({"x": 0.006, "y": 0.003}.get(call.role, 0))
        return f"said {call.role}"

    async def solve(task: Any) -> float:
        await agent("boss", tools=[ask], reflect_on_tool_use=True).run(task="hi")
        return 1.0

    record(solve, reply)
    assert sorted(record.roles) == ["boss", "boss", "x", "y", "z"]
    assert set(record.calls[4].parents) == {call.id for call in record.calls[:4]}


def test_direct_calls_of_an_agents_methods(nowhere: None, record: Recorded):
    async def solve(task: Any) -> float:
        writer = agent("writer")
        await writer.on_messages([TextMessage(content="hi", source="user")], CancellationToken())
        await writer._model_client.create([UserMessage(content="plain", source="user")])
        await writer.on_reset(CancellationToken())
        return 1.0

    record(solve, lambda call: "x")
    assert record.roles == ["writer", "writer"]


@dataclass
class Ask:
    text: str


class Core(RoutedAgent):
    """An agent of autogen_core, which is in no team."""

    def __init__(self) -> None:
        super().__init__("core")
        self._model_client = autogen_client()
        self._plain = autogen_client()

    @message_handler
    async def handle(self, message: Ask, ctx: MessageContext) -> Ask:
        await self._plain.create([UserMessage(content=message.text, source="user")])
        answer = await self._model_client.create([UserMessage(content=message.text, source="user")])
        return Ask(str(answer.content))


def test_agents_of_the_core_are_their_type(nowhere: None, record: Recorded):
    async def solve(task: Any) -> float:
        runtime = SingleThreadedAgentRuntime()
        await Core.register(runtime, "worker", Core)
        runtime.start()
        found = await runtime.send_message(Ask("hi"), AgentId("worker", "default"))
        await runtime.stop_when_idle()
        return float(found.text == "x")

    assert record(solve, lambda call: "x").rewards == {"team": 1.0}
    assert record.roles == ["worker", "worker"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_many_teams_at_once_never_mix(nowhere: None, seed: int):
    rng = random.Random(seed)
    sinks = [Sink() for _ in range(6)]

    async def reply(call: Any) -> str:
        await asyncio.sleep(rng.random() * 0.004)
        name = call.messages[0]["content"].removeprefix("I am ").removesuffix(".")
        return f"{name} {call.messages[1]['content']}"

    def solve_of(number: int) -> Any:
        async def solve(task: Any) -> float:
            async def one(i: int) -> int:
                members = [agent(name, model_client_stream=rng.random() < 0.5) for name in "abc"]
                ends = MaxMessageTermination(5)
                await RoundRobinGroupChat(members, termination_condition=ends).run(task=f"task {number}.{i}")
                return 4

            return float(sum(await asyncio.gather(*(one(i) for i in range(3)))))

        return solve

    async def run() -> Any:
        return await asyncio.gather(*(episode(solve_of(i), reply, sink) for i, sink in enumerate(sinks)))

    assert [outcome.rewards for outcome in asyncio.run(run())] == [{"team": 12.0}] * 6
    for number, sink in enumerate(sinks):
        stored = {r.id: r.body for r in sink if isinstance(r, Message)}
        calls = sink.calls()
        by_id = {call.id: call for call in calls}
        assert len(calls) == 12
        for call in calls:
            asked = [stored[name]["content"] for name in call.messages]
            assert asked[0] == f"I am {call.role}."
            assert asked[1].startswith(f"task {number}.")
            assert {by_id[parent].candidates[0].text for parent in call.parents} == set(asked[2:])
        for role in "abc":
            turns = sorted(call.turn for call in calls if call.role == role)
            assert turns == list(range(len(turns)))
