"""Who makes a call: roles, states and parents in LangGraph applications of every shape."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TypedDict

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.func import entrypoint
from langgraph.func import task as unit
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import create_react_agent
from langgraph.types import Send
from pydantic import BaseModel

import cotune
from tests.integrations.graphs import HELLO, asays, chain, client, look, model, running, says, scripted
from tests.integrations.provider import Provider
from tests.integrations.recorded import Recorded, asks, tool_call

pytestmark = pytest.mark.usefixtures("nowhere")


# Ways to run, and ways to call


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "messages", "amessages", "values", "aupdates"])
def test_nodes_are_roles_whatever_way_the_graph_runs(record: Recorded, way: str):
    def sync_stream(state):
        parts = list(model.stream(state["messages"]))
        return {"messages": [AIMessage("".join(str(p.content) for p in parts), id=parts[0].id)]}

    async def async_stream(state):
        parts = [part async for part in model.astream(state["messages"])]
        return {"messages": [AIMessage("".join(str(p.content) for p in parts), id=parts[0].id)]}

    nodes = (
        [("first", asays), ("second", async_stream)]
        if way.startswith("a")
        else [("first", says), ("second", sync_stream)]
    )
    record(running(chain(*nodes), way), scripted())
    first, second = record.calls
    assert [(c.role, c.step, c.turn, c.integration) for c in record.calls] == [
        ("first", 0, 0, "langgraph"),
        ("second", 1, 0, "langgraph"),
    ]
    assert (first.parents, second.parents) == ((), (first.id,))
    assert second.streamed


def test_state_is_the_input_of_the_node_that_calls(record: Recorded):
    class State(TypedDict, total=False):
        question: str
        answer: str

    graph = chain(
        ("ask", lambda state: {"answer": model.invoke(state["question"]).content}),
        ("check", lambda state: {"answer": model.invoke(f"is it {state['answer']}?").content}),
        state=State,
    )
    states = []
    record(running(graph, given={"question": "why"}), lambda call: states.append(dict(call.state)) or "so")
    assert states == [{"question": "why"}, {"question": "why", "answer": "so"}]


def test_calls_of_every_kind_inside_one_node(record: Recorded):
    class Point(BaseModel):
        x: int

    def node(state):
        with_tools = model.bind_tools([look]).invoke("tools")
        assert with_tools.tool_calls[0]["name"] == "look"
        assert model.with_structured_output(Point).invoke("structured") == Point(x=1)
        model.batch(["batch", "batch"])
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "plain"}])
        thread = threading.Thread(target=model.invoke, args=("thread",))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model.invoke, "pool").result()
        return {"messages": with_tools}

    def reply(call):
        if call.params.get("response_format"):
            return '{"x": 1}'
        return asks(tool_call("look", {"q": "x"})) if call.tools else "x"

    record(running(chain(("node", node))), reply)
    assert record.roles == ["node"] * 7
    assert [c.turn for c in record.calls] == list(range(7))
    assert record.statuses == ["ok"] * 7


def test_gather_inside_a_node(record: Recorded):
    async def node(state):
        return {"messages": await asyncio.gather(*(model.ainvoke(f"{i}") for i in range(3)))}

    record(running(chain(("node", node)), "ainvoke"), scripted())
    assert record.roles == ["node"] * 3


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_send_fan_outs_are_one_role(record: Recorded, way: str):
    class State(TypedDict):
        out: Annotated[list, operator.add]

    def worker(state):
        return {"out": [model.invoke(str(state["x"])).content]}

    async def async_worker(state):
        return {"out": [(await model.ainvoke(str(state["x"]))).content]}

    builder = StateGraph(State)
    builder.add_node("plan", lambda state: {})
    builder.add_node("worker", worker if way == "invoke" else async_worker)
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", lambda state: [Send("worker", {"x": i}) for i in range(4)], ["worker"])
    pairs = []
    record(
        running(builder.compile(), way, {"out": []}),
        lambda call: pairs.append((call.state["x"], call.messages[0]["content"])) or "x",
    )
    assert sorted(pairs) == [(i, str(i)) for i in range(4)]
    assert record.roles == ["worker"] * 4
    assert sorted(c.turn for c in record.calls) == [0, 1, 2, 3]


# Nested graphs (points 1, 2, 3, 4)


def test_equal_node_names_in_nested_graphs_are_different_roles(record: Recorded):
    graph = chain(("a", chain(("writer", says))), ("b", chain(("writer", says))), ("writer", says))
    record(running(graph), scripted())
    assert record.roles == ["a/writer", "b/writer", "writer"]


def test_prebuilt_nodes_give_way_to_the_name_around_them(record: Recorded):
    own = chain(("agent", says))
    graph = chain(
        ("plain", own),
        ("unnamed", create_agent(model, [])),
        ("node", create_agent(model, [], name="named")),
        ("react", create_react_agent(model, [], name="reacty")),
    )
    record(running(graph), scripted())
    assert record.roles == ["plain", "unnamed", "named", "reacty"]


def test_a_lone_prebuilt_node_keeps_its_name(record: Recorded):
    record(running(chain(("agent", says))), scripted())
    record(running(create_agent(model, [])), scripted())
    assert record.roles == ["agent", "model"]


def test_subgraphs_as_nodes_by_invoke_and_by_gather_in_parallel(record: Recorded):
    inner = chain(("work", asays))

    async def by_invoke(state):
        return {"messages": (await inner.ainvoke(HELLO))["messages"][-1:]}

    async def by_gather(state):
        states = await asyncio.gather(*(inner.ainvoke(HELLO) for _ in range(3)))
        return {"messages": [s["messages"][-1] for s in states]}

    record(running(chain(("as_node", inner), by_invoke, by_gather), "ainvoke"), scripted())
    assert record.roles == ["as_node/work", "by_invoke/work", *["by_gather/work"] * 3]


def test_identical_requests_of_different_roles(record: Recorded):
    async def same(state):
        await model.ainvoke("the same")

    builder = StateGraph(MessagesState)
    for name in ("a", "b", "c"):
        builder.add_node(name, same)
        builder.add_edge(START, name)
    record(running(builder.compile(), "ainvoke"), scripted())
    assert sorted(record.roles) == ["a", "b", "c"]
    assert {c.turn for c in record.calls} == {0}


def test_overlapping_episodes_of_one_graph():
    async def slow(call):
        for _ in range(call.step % 3):
            await asyncio.sleep(0)
        return call.role

    async def main():
        from tests.integrations.recorded import episode

        several = [Recorded() for _ in range(8)]
        graph = chain(("a", asays), ("b", says), ("c", chain(("d", asays))))
        await asyncio.gather(*(episode(running(graph, "ainvoke"), slow, r.sink) for r in several))
        return several

    assert [r.roles for r in asyncio.run(main())] == [["a", "b", "c/d"]] * 8


# Agents, tools, middleware (points 5, 7, 16)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_agents_inside_tools_of_agents(record: Recorded, way: str):
    writer = create_agent(model, [], name="writer")
    nameless = create_agent(model, [])
    plain = chain(("draft", says))

    @tool
    def ask_writer(q: str) -> str:
        """Ask a named agent."""
        return writer.invoke({"messages": [("user", q)]})["messages"][-1].content

    @tool
    def ask_nameless(q: str) -> str:
        """Ask an agent without a name."""
        return nameless.invoke({"messages": [("user", q)]})["messages"][-1].content

    @tool
    def ask_plain(q: str) -> str:
        """Ask a graph."""
        return plain.invoke({"messages": [("user", q)]})["messages"][-1].content

    @tool
    def ask_model(q: str) -> str:
        """Ask the model itself."""
        return model.invoke(q).content

    tools = [ask_writer, ask_nameless, ask_plain, ask_model]
    boss = create_agent(model, tools, name="boss")
    order = [asks(tool_call(t.name, {"q": "x"}, f"call_{i}")) for i, t in enumerate(tools)]
    record(running(chain(("office", boss)), way), scripted(("boss", order)))
    assert record.roles == [
        "boss", "writer", "boss", "boss/ask_nameless", "boss", "boss/ask_plain/draft", "boss", "boss/ask_model", "boss",
    ]  # fmt: skip
    bosses = [c for c in record.calls if c.role == "boss"]
    assert [c.turn for c in bosses] == [0, 1, 2, 3, 4]
    assert bosses[1].parents == (bosses[0].id,)
    assert bosses[4].parents == tuple(c.id for c in bosses[:4])


def test_middleware_of_an_agent_is_a_role_of_its_own(record: Recorded):
    shorten = SummarizationMiddleware(model=model, trigger=("messages", 2), keep=("messages", 1))
    agent = create_agent(model, [], name="chatty", middleware=[shorten])
    long = {"messages": [("user", "a"), ("ai", "b"), ("user", "c"), ("ai", "d"), ("user", "e")]}
    record(running(agent, given=long), scripted())
    assert record.roles == ["chatty/SummarizationMiddleware", "chatty"]


def test_structured_agents_and_forced_tools(record: Recorded):
    class Point(BaseModel):
        """A point."""

        x: int

    agent = create_agent(model, [look], name="pointer", response_format=Point)

    def run(task):
        return agent.invoke(HELLO)["structured_response"].x

    def reply(call):
        return '{"x": 3}' if call.params.get("response_format") else asks(tool_call("Point", {"x": 3}))

    assert record(run, reply).rewards == {"team": 3.0}
    assert record.roles == ["pointer"]


def test_history_that_is_deleted_and_rewritten_keeps_exact_parents(record: Recorded):
    def forget(state):
        last = state["messages"][-1]
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("anew"), last]}

    def swap(state):
        turned = [HumanMessage(m.content) if m.type == "ai" else AIMessage(m.content) for m in state["messages"]]
        return {"messages": [model.invoke(turned)]}

    record(running(chain(("a", says), ("b", says), forget, ("c", says), swap)), scripted())
    a, b, c, swapped = record.calls
    assert [call.parents for call in (a, b, c)] == [(), (a.id,), (b.id,)]
    assert swapped.parents == ()


def test_messages_without_ids_still_name_their_parents(record: Recorded):
    def copy(state):
        return {"messages": [model.invoke([("user", "x"), ("ai", state["messages"][-1].content)])]}

    record(running(chain(("a", says), copy)), scripted())
    assert record.calls[1].parents == (record.calls[0].id,)


def test_functional_api(record: Recorded):
    @unit
    def part(x):
        return model.invoke(x).content

    @entrypoint()
    def whole(x):
        return [future.result() for future in [part(x), part(x)]]

    def run(task):
        return len(whole.invoke("q"))

    assert record(run, scripted()).rewards == {"team": 2.0}
    assert record.roles == ["whole/part", "whole/part"]


def test_callbacks_replaced_on_the_way_do_not_lose_the_role(record: Recorded):
    named = create_agent(model, [], name="named")
    inner = chain(("work", says))

    def node(state):
        inner.invoke(HELLO, {"callbacks": []})
        named.invoke(HELLO, {"callbacks": []})
        model.invoke("x", {"callbacks": []})

    record(running(chain(("outer", chain(("node", node))))), scripted())
    assert record.roles == ["outer/node/work", "named", "outer/node"]


# Calls of no agent, overrides (point 6)


def test_calls_outside_any_graph_never_get_an_earlier_role(record: Recorded):
    graph = chain(("node", says))

    async def run(task):
        await model.ainvoke("before")
        await graph.ainvoke(HELLO)
        await model.ainvoke("after")
        await asyncio.to_thread(
            client.chat.completions.create, model="m", messages=[{"role": "user", "content": "plain"}]
        )
        return 1

    record(run, scripted())
    assert record.roles == ["app", "node", "app", "app"]


def test_the_plain_sdk_after_a_chat_model_in_one_node(record: Recorded):
    def node(state):
        model.invoke("x")
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "y"}])

    states = []
    record(running(chain(("node", node))), lambda call: states.append(bool(call.state)) or "x")
    assert record.roles == ["node", "node"]
    assert states == [True, True]


def test_an_explicit_role_wins_and_ends(record: Recorded):
    def node(state):
        with cotune.role("judge"):
            model.invoke("x")
        model.invoke("y")

    record(running(chain(("node", node))), scripted())
    assert [(c.role, c.integration) for c in record.calls] == [("judge", "override"), ("node", "langgraph")]


# What the application does with failures (points 10, 11)


def test_swallowed_failures_and_own_retries(record: Recorded):
    from cotune.errors import SamplerError

    def node(state):
        with contextlib.suppress(openai.BadRequestError):
            model.invoke("lost")
        return {"messages": [model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False).invoke("again")]}

    def reply(call):
        if call.turn < 2:
            raise SamplerError("full")
        return "x"

    outcome = record(running(chain(("node", node))), reply)
    assert [(c.role, c.turn, c.status) for c in record.calls] == [
        ("node", 0, "error"),
        ("node", 1, "error"),
        ("node", 2, "ok"),
    ]
    assert outcome.live.failures == {"error": 2}
    assert outcome.episode.status == "ok"


class KeptCache(InMemoryCache):
    async def alookup(self, prompt, llm_string):
        return self.lookup(prompt, llm_string)


@pytest.mark.parametrize("kind", [InMemoryCache, KeptCache])
def test_a_cache_is_left_aside_where_policies_answer_and_its_answers_are_counted_elsewhere(
    provider: Provider, record: Recorded, kind: type[InMemoryCache]
):
    cache = kind()
    cached = ChatOpenAI(model="m", base_url=provider.url, api_key="none", max_retries=0, cache=cache)

    async def asked_twice(state):
        return {"messages": [cached.invoke("x"), await cached.ainvoke("x")]}

    graph = chain(("node", asked_twice))
    outcome = record(running(graph, "ainvoke"), scripted())
    assert (record.roles, provider.requests, cache._cache) == (["node", "node"], [], {})
    assert outcome.live.warnings["unused_cache"] == 4
    outcome = record(running(graph, "ainvoke"))
    assert (record.roles, len(provider.requests), len(cache._cache)) == (["node"] * 3, 1, 1)
    assert outcome.live.warnings["unseen_call"] == 1
