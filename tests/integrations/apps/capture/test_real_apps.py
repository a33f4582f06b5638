"""What real applications do to a recorder, point by point, with LangGraph and with the plain OpenAI SDK."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, interrupt

import cotune
from cotune.integrations.apps.langgraph.run_tree import GraphRun
from cotune.records.structs import Message
from tests.integrations.graphs import HELLO, URL, asays, chain, client, look, model, node_of, running, says, scripted
from tests.integrations.provider import Provider, json_reply, said
from tests.integrations.recorded import Recorded, answer, asks, episode, tool_call

pytestmark = pytest.mark.usefixtures("nowhere")
ASK = [{"role": "user", "content": "x"}]


def plainly(**options):
    return client.chat.completions.create(model="m", messages=ASK, **options)


def test_01_node_names_repeat_in_nested_graphs_and_inner_names_hide_nothing(record: Recorded):
    react = chain(("agent", asays), ("model", asays))
    inner = chain(("writer", asays), ("agent", react))
    graph = chain(("left", inner), ("right", inner), ("writer", asays), ("named", create_agent(model, [], name="ann")))
    record(running(graph, "ainvoke"), scripted())
    sides = [name for side in ("left", "right") for name in (f"{side}/writer", side, side)]
    assert record.roles == [*sides, "writer", "ann"]


def test_02_a_subgraph_several_times_in_parallel_in_a_node_is_one_role(record: Recorded):
    inner = chain(("work", asays))

    async def node(state):
        await asyncio.gather(*(inner.ainvoke(HELLO) for _ in range(3)))
        await asyncio.gather(*(inner.ainvoke(HELLO, {"callbacks": []}) for _ in range(2)))

    record(running(chain(("node", node)), "ainvoke"), scripted())
    assert [(c.role, c.turn) for c in record.calls] == [("node/work", turn) for turn in range(5)]


def test_03_subgraphs_as_nodes_by_invoke_and_by_gather(record: Recorded):
    inner = chain(("work", asays))

    async def invoked(state):
        await inner.ainvoke(HELLO)

    async def gathered(state):
        await asyncio.gather(inner.ainvoke(HELLO), inner.ainvoke(HELLO))

    def in_a_thread(state):
        asyncio.run(inner.ainvoke(HELLO))

    record(running(chain(("as_node", inner), invoked, gathered, in_a_thread), "ainvoke"), scripted())
    assert record.roles == ["as_node/work", "invoked/work", "gathered/work", "gathered/work", "in_a_thread/work"]


def test_04_text_never_identifies_a_role(record: Recorded):
    varied = iter(["You are A.", "You are B."])

    def same(state):
        plainly()

    def varies(state):
        model.invoke([("system", next(varied)), ("user", "x")])

    record(running(chain(("one", same), ("two", same), ("varies", varies))), scripted())
    record(running(chain(("varies", varies))), scripted())
    assert sorted(record.roles) == ["one", "two", "varies", "varies"]


def test_05_the_framework_adds_roles_of_its_own(record: Recorded):
    shorten = SummarizationMiddleware(model=model, trigger=("messages", 3), keep=("messages", 1))
    agent = create_agent(model, [look], name="boss", middleware=[shorten])
    record(running(agent), lambda c: asks(tool_call("look", {"q": "x"})) if c.role == "boss" and c.turn == 0 else "x")
    assert record.roles == ["boss", "boss/SummarizationMiddleware", "boss"]


def test_06_calls_of_no_agent_have_the_role_of_the_step_or_app(record: Recorded):
    agent = create_agent(model, [], name="agent_smith")

    async def direct(state):
        await model.ainvoke("x")
        plainly()

    async def run(task):
        plainly()
        await agent.ainvoke(HELLO)
        plainly()
        await model.ainvoke("x")
        await chain(direct).ainvoke(HELLO)
        with cotune.role("judge"):
            plainly()
        return 1

    record(run, scripted())
    assert record.roles == ["app", "agent_smith", "app", "app", "direct", "direct", "judge"]


def test_07_roles_are_a_stack_that_is_restored_on_return(record: Recorded):
    @tool
    async def deepest(q: str) -> str:
        """Ask the model itself."""
        plainly()
        return "x"

    low = create_agent(model, [deepest], name="low")

    @tool
    async def ask_low(q: str) -> str:
        """Ask the lower agent."""
        await low.ainvoke(HELLO)
        return (await model.ainvoke("after low")).text

    high = create_agent(model, [ask_low], name="high")
    goes_down = {"high": [asks(tool_call("ask_low", {"q": "x"}))], "low": [asks(tool_call("deepest", {"q": "x"}))]}
    record(running(high, "ainvoke"), scripted(*goes_down.items()))
    assert record.roles == ["high", "low", "low/deepest", "low", "high/ask_low", "high"]


def test_08_agents_are_made_anew_wrapped_and_share_names(record: Recorded):
    def team():
        return chain(("writer", create_agent(model, [])), ("critic", create_agent(model, []).with_retry()))

    async def run(task):
        for _ in range(2):
            await chain(("red", team()), ("blue", team())).ainvoke(HELLO)
        return 1

    record(run, scripted())
    names = ["red/writer", "red/critic", "blue/writer", "blue/critic"]
    assert [(c.role, c.turn) for c in record.calls] == [(n, t) for t in range(2) for n in names]


def test_09_pools_dozens_of_runs_and_several_episodes_at_once():
    shared = ThreadPoolExecutor(4)

    def fans(state):
        list(shared.map(lambda _: plainly(), range(3)))

    graph = chain(("first", asays), fans, ("last", chain(("deep", asays))))

    async def run(task):
        await asyncio.gather(*(graph.ainvoke(HELLO) for _ in range(4)))
        return 1

    async def main():
        several = [Recorded() for _ in range(6)]
        await asyncio.gather(*(episode(run, lambda call: call.role, r.sink) for r in several))
        return several

    several = asyncio.run(main())
    shared.shutdown()
    expected = sorted(["first"] * 4 + ["fans"] * 12 + ["last/deep"] * 4)
    assert [sorted(r.roles) for r in several] == [expected] * 6
    assert all(c.candidates[0].text == c.role for r in several for c in r.calls)


def test_10_retries_of_the_sdk_count_once_and_those_of_the_application_each(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: json_reply({}, 500) if number in (0, 2) else said(body)
    patient = openai.OpenAI(base_url=provider.url, max_retries=1)
    hasty = ChatOpenAI(model="m", base_url=provider.url, max_retries=0)

    def node():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patient, "_calculate_retry_timeout", lambda *args: 0.0)
            patient.chat.completions.create(model="m", messages=ASK)
        hasty.with_retry(stop_after_attempt=2, wait_exponential_jitter=False).invoke("x")

    record(node_of(node))
    assert [(c.role, c.status, len(c.attempts)) for c in record.calls] == [
        ("node", "ok", 1),
        ("node", "error", 0),
        ("node", "ok", 0),
    ]
    assert len(provider.requests) == 4


def test_11_swallowed_failures_and_the_recorders_own_are_counted(
    provider: Provider, record: Recorded, monkeypatch: pytest.MonkeyPatch
):
    provider.reply = lambda body, number: json_reply({}, 500)
    failing = ChatOpenAI(model="m", base_url=provider.url, max_retries=0)
    monkeypatch.setattr(GraphRun, "tool", lambda *args: 1 / 0)

    @tool
    def tries(q: str) -> str:
        """Try, and say nothing of the failure."""
        with contextlib.suppress(Exception):
            failing.invoke("x")
        return "fine"

    outcome = record(node_of(lambda: tries.invoke({"q": "x"})))
    assert (outcome.episode.status, outcome.live.failures) == ("ok", {"error": 1})
    assert outcome.live.warnings["langgraph"] >= 1
    assert record.statuses == ["error"]


def test_12_other_interfaces_clients_made_before_and_subclasses(record: Recorded):
    class Own(ChatOpenAI):
        def invoke(self, *args, **options):
            return AIMessage(plainly().choices[0].message.content)

    before, switched = openai.AsyncOpenAI(base_url=URL, api_key="none"), model.model_copy()
    switched.use_responses_api = True

    async def node(state):
        await before.chat.completions.create(model="m", messages=ASK)
        await before.responses.create(model="m", input="x")
        Own(model="m", base_url=URL, api_key="none").invoke("x")
        await switched.ainvoke("x")

    record(running(chain(("node", node)), "ainvoke"), scripted())
    assert [(c.role, c.status, c.candidates[0].text) for c in record.calls] == [
        ("node", "ok", f"node {turn}") for turn in range(4)
    ]


def test_13_streaming_by_constructor_by_mode_and_by_draining(record: Recorded):
    streams = ChatOpenAI(model="m", base_url=URL, api_key="none", streaming=True)

    async def node(state):
        assert (await streams.ainvoke("x")).text == "node 0"
        assert "".join([part.text async for part in model.astream("x")]) == "node 1"
        assert "".join(part.choices[0].delta.content or "" for part in plainly(stream=True)) == "node 2"
        await model.ainvoke("x")

    record(running(chain(("node", node)), "amessages"), scripted())
    assert [(c.role, c.streamed, c.status) for c in record.calls] == [("node", True, "ok")] * 4


def test_14_several_choices_forced_tools_strict_schemas_and_null_fields(record: Recorded):
    schema = {"name": "p", "strict": True, "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}

    def node():
        assert len(plainly(n=2).choices) == 2
        forced = {"type": "function", "function": {"name": "look"}}
        found = plainly(tools=[{"type": "function", "function": function}], tool_choice=forced, stop=None, seed=None)
        assert found.choices[0].message.tool_calls[0].function.name == "look"
        plainly(response_format={"type": "json_schema", "json_schema": schema}, temperature=None)

    def reply(call):
        if call.tools:
            return asks(tool_call("look", {}))
        return answer("a", "b") if call.params.get("n") else '{"x": 1}'

    record(node_of(node), reply)
    assert [(c.role, c.status, len(c.candidates)) for c in record.calls] == [
        ("node", "ok", 2),
        ("node", "ok", 1),
        ("node", "ok", 1),
    ]
    assert record.calls[1].params["tool_choice"]["function"] == {"name": "look"}
    assert record.calls[2].params["response_format"]["json_schema"]["strict"] is True


def test_15_model_names_and_temperatures_are_recorded_as_the_application_fixed_them(record: Recorded):
    named = {name: ChatOpenAI(model=name, temperature=0.3, base_url=URL, api_key="none") for name in ("red", "blue")}

    def debate():
        for name, chat in named.items():
            chat.invoke("the same to both")
            with cotune.role(name):
                chat.invoke("the same to both")

    record(node_of(debate), scripted())
    assert [(c.role, c.model) for c in record.calls] == [
        ("node", "red"),
        ("red", "red"),
        ("node", "blue"),
        ("blue", "blue"),
    ]
    assert {c.params["temperature"] for c in record.calls} == {0.3}
    assert len({c.messages for c in record.calls}) == 1


def test_16_history_is_deleted_filtered_and_swapped(record: Recorded):
    def forget(state):
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("anew"), state["messages"][-1]]}

    def swap(state):
        turned = [HumanMessage(m.content) if m.type == "ai" else AIMessage(m.content) for m in state["messages"]]
        model.invoke(turned)

    def clear(state):
        plainly()

    record(running(chain(("a", says), ("b", says), forget, ("c", says), swap, clear)), scripted())
    a, b, c, swapped, cleared = record.calls
    assert [call.parents for call in record.calls] == [(), (a.id,), (b.id,), (), ()]
    bodies = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    assert [bodies[m]["content"] for m in c.messages] == ["anew", "b 0"]
    assert [bodies[m]["role"] for m in swapped.messages] == ["assistant", "user", "user"]
    assert cleared.messages != swapped.messages


def test_17_one_run_of_an_application_spans_several_runs_of_the_framework(record: Recorded):
    def ask(state):
        question = model.invoke(state["messages"])
        return {"messages": [question, HumanMessage(interrupt(question.text))]}

    graph = chain(ask, ("answer", says), checkpointer=InMemorySaver())

    async def run(task):
        config = {"configurable": {"thread_id": "1"}}
        await graph.ainvoke(HELLO, config)
        await graph.ainvoke(Command(resume="go on"), config)
        await graph.ainvoke(HELLO, {"configurable": {"thread_id": "reset"}})
        return 1

    outcome = record(run, scripted())
    assert outcome.episode.calls == 4
    assert [(c.role, c.turn) for c in record.calls] == [("ask", 0), ("ask", 1), ("answer", 0), ("ask", 2)]
    assert record.calls[2].parents == (record.calls[1].id,)


def test_18_traffic_of_tools_and_embeddings_are_not_calls(provider: Provider, record: Recorded):
    embedded = {"object": "list", "model": "e", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}]}
    usage = {"usage": {"prompt_tokens": 1, "total_tokens": 1}}
    provider.reply = lambda body, n: json_reply({**embedded, **usage}) if "input" in body else said(body)
    chat = ChatOpenAI(model="m", base_url=provider.url)
    vectors = OpenAIEmbeddings(base_url=provider.url, check_embedding_ctx_length=False)

    @tool
    def fetch(q: str) -> str:
        """Fetch something."""
        return httpx.post(f"{provider.url}/chat/completions", json={"messages": ASK}).text

    def node():
        assert vectors.embed_query("x") == [0.5]
        fetch.invoke({"q": "x"})
        thread = threading.Thread(target=chat.invoke, args=("x",))
        thread.start()
        thread.join()

    record(node_of(node))
    assert record.roles == ["node"]
    assert len(provider.requests) == 3
