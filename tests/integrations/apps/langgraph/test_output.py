"""What is asked of a model and what it returns: structured output, tools, several choices, chains, other interfaces."""

from __future__ import annotations

import asyncio

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from cotune.errors import SamplerError
from cotune.records.structs import Message
from tests.integrations.graphs import HELLO, URL, chain, look, model, node_of, running, scripted
from tests.integrations.provider import Provider, json_reply
from tests.integrations.recorded import Recorded, answer, asks, tool_call

pytestmark = pytest.mark.usefixtures("nowhere")


class Point(BaseModel):
    """A point."""

    x: int


POINT = asks(tool_call("Point", {"x": 3}))


def other(**options):
    return ChatOpenAI(**{"model": "m", "base_url": URL, "api_key": "none", "max_retries": 0, **options})


# Structured output and tools


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_every_method_of_structured_output(record: Recorded, method: str, raw: bool):
    asked = model.with_structured_output(Point, method=method, include_raw=raw)

    async def run(task):
        found = [await asked.ainvoke("json x"), await asyncio.to_thread(asked.invoke, "json x")]
        return sum((f["parsed"] if raw else f).x for f in found)

    outcome = record(run, lambda call: POINT if call.tools else '{"x": 3}')
    assert outcome.rewards == {"team": 6.0}
    assert record.statuses == ["ok", "ok"]
    forms = [call.params.get("response_format", {}).get("type") for call in record.calls]
    assert forms == [{"json_mode": "json_object", "json_schema": "json_schema"}.get(method)] * 2
    assert bool(record.calls[0].tools) == (method == "function_calling")


@pytest.mark.parametrize(
    "form", [ToolStrategy(Point), ProviderStrategy(Point), Point], ids=["tool", "provider", "auto"]
)
def test_every_strategy_of_an_agent(record: Recorded, form):
    agent = create_agent(model, [look], name="boss", response_format=form)

    def run(task):
        return agent.invoke(HELLO)["structured_response"].x

    def reply(call):
        offered = [tool["function"]["name"] for tool in call.tools]
        return POINT if "Point" in offered else '{"x": 3}'

    assert record(run, reply).rewards == {"team": 3.0}
    assert record.roles == ["boss"]


def test_an_answer_that_does_not_fit_is_asked_for_again(record: Recorded):
    agent = create_agent(model, [], name="boss", response_format=ToolStrategy(Point))

    def run(task):
        return agent.invoke(HELLO)["structured_response"].x

    record(run, lambda call: asks(tool_call("Point", {"x": "three"})) if call.turn == 0 else POINT)
    first, second = record.calls
    assert (first.role, second.role, second.parents) == ("boss", "boss", (first.id,))


def test_forced_strict_and_parallel_tools(record: Recorded):
    forced = model.bind_tools([look], tool_choice="look", strict=True, parallel_tool_calls=False)
    both = asks(tool_call("look", {"q": "a"}, "c1"), tool_call("look", {"q": "b"}, "c2"))
    agent = create_agent(model, [look], name="boss")

    def run(task):
        assert forced.invoke("x").tool_calls[0]["args"] == {"q": "a"}
        return sum(isinstance(m, ToolMessage) for m in agent.invoke(HELLO)["messages"])

    outcome = record(run, lambda c: both if c.messages[-1]["role"] == "user" else "done")
    assert outcome.rewards == {"team": 2.0}
    call = record.calls[0]
    assert call.params["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert call.params["parallel_tool_calls"] is False
    bodies = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    assert bodies[call.tools][0]["function"]["strict"] is True
    assert [bodies[m]["role"] for m in record.calls[2].messages] == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("way", ["invoke", "messages"])
def test_a_malformed_tool_call_reaches_an_agent_as_what_was_said(record: Recorded, way: str):
    said = '<tool_call>{"name": "look", "argum</tool_call>'
    record(running(create_agent(model, [look], name="boss"), way), scripted(("boss", [said])))
    assert [(c.role, c.candidates[0].text) for c in record.calls] == [("boss", said)]


def test_several_choices(record: Recorded):
    several = other(n=2)

    def node():
        texts = [g.text for g in several.generate([[HumanMessage("x")]]).generations[0]]
        assert texts == ["b", "a"]

    record(node_of(node), lambda call: answer("a", "b", chosen=1))
    (call,) = record.calls
    assert (call.role, call.params["n"], call.chosen, [c.text for c in call.candidates]) == ("node", 2, 1, ["a", "b"])


# Chains without a graph, and models of every making


def test_chains(record: Recorded):
    ask = ChatPromptTemplate.from_template("about {x}") | model | StrOutputParser()
    both = RunnableParallel(a=ask, b=ask)

    def inside():
        ask.invoke({"x": 1})
        both.invoke({"x": 1})
        ask.map().invoke([{"x": 1}, {"x": 2}])
        list(model.batch_as_completed(["a", "b"]))

    async def outside(task):
        assert set(await both.ainvoke({"x": 1})) == {"a", "b"}
        return 1

    record(outside, scripted())
    assert record.roles == ["app", "app"]
    record(node_of(inside), scripted())
    as_node = RunnableLambda(lambda s: {"x": 1}) | ask | RunnableLambda(lambda s: {})
    record(running(chain(("chained", as_node))), scripted())
    assert sorted(c.role for c in record.calls) == ["app"] * 2 + ["chained"] + ["node"] * 7


def test_retries_and_fallbacks_of_the_application_are_new_calls(record: Recorded):
    backed = other(model="bad").with_retry(stop_after_attempt=2, wait_exponential_jitter=False).with_fallbacks([model])

    def reply(call):
        if call.model == "bad":
            raise SamplerError("no")
        return "x"

    record(node_of(lambda: backed.invoke("x")), reply)
    assert [(c.role, c.model, c.status) for c in record.calls] == [
        ("node", "bad", "error"),
        ("node", "bad", "error"),
        ("node", "m", "ok"),
    ]


def test_models_made_by_name_and_configured_at_run_time(record: Recorded):
    named = init_chat_model("openai:fixed", base_url=URL)
    open_ended = init_chat_model("first", model_provider="openai", configurable_fields=("model",), base_url=URL)

    def node():
        named.invoke("x")
        open_ended.invoke("x", {"configurable": {"model": "second"}})
        open_ended.bind_tools([look]).with_config(configurable={"model": "third"}).invoke("x")

    record(node_of(node), scripted())
    assert [(c.role, c.model) for c in record.calls] == [("node", "fixed"), ("node", "second"), ("node", "third")]


def test_subclasses_that_override_what_is_called(record: Recorded):
    body = {"model": "own", "messages": [{"role": "user", "content": "x"}]}

    class Invokes(ChatOpenAI):
        def invoke(self, *args, **options):
            return AIMessage(self.root_client.chat.completions.create(**body).choices[0].message.content)

    class Generates(ChatOpenAI):
        def _generate(self, messages, stop=None, run_manager=None, **options):
            said = self.root_client.chat.completions.create(**body).choices[0].message.content
            return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])

    class Passes(ChatOpenAI):
        def invoke(self, *args, **options):
            return super().invoke(*args, **options)

        def _generate(self, *args, **options):
            return super()._generate(*args, **options)

    def node():
        for cls in (Invokes, Generates, Passes):
            cls(model="m", base_url=URL, api_key="none", max_retries=0).invoke("x")

    record(node_of(node), scripted())
    assert [(c.role, c.model) for c in record.calls] == [("node", "own"), ("node", "own"), ("node", "m")]


def test_a_loop_without_a_graph_keeps_its_parents(record: Recorded):
    with_tools = model.bind_tools([look])

    def run(task):
        messages = [HumanMessage("x")]
        while (said := with_tools.invoke(messages)).tool_calls:
            messages += [said, *(look.invoke(call) for call in said.tool_calls)]
        return len(messages)

    script = [asks(tool_call("look", {"q": "x"}, f"c{i}")) for i in range(2)]
    assert record(run, scripted(("app", script))).rewards == {"team": 5.0}
    first, second, third = record.calls
    assert [c.role for c in record.calls] == ["app"] * 3
    assert (second.parents, third.parents) == ((first.id,), (first.id, second.id))


# The Responses interface


def responded(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": "i1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    head = {"id": "r1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "error": None}
    rest = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "incomplete_details": None}
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {**head, **rest, "output": [item], "usage": {**usage, **details}, "instructions": None, "metadata": {}}


def test_agents_and_structured_output_by_the_responses_interface(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: json_reply(responded('{"x": 3}'))
    by_responses = other(base_url=provider.url, use_responses_api=True)
    agent = create_agent(by_responses, [look], name="boss")

    def run(task):
        agent.invoke(HELLO)
        return by_responses.with_structured_output(Point).invoke("x").x

    assert record(run).rewards == {"team": 3.0}
    assert [(c.role, c.status, c.candidates[0].text) for c in record.calls] == [
        ("boss", "ok", '{"x": 3}'),
        ("app", "ok", '{"x": 3}'),
    ]
    assert len(provider.requests) == 2


def test_parents_by_the_responses_interface_are_known_by_id(record: Recorded):
    by_responses = other(use_responses_api=True)

    def same(state):
        return {"messages": [by_responses.invoke(state["messages"][-1:])]}

    async def streamed(state):
        parts = [part async for part in by_responses.astream(state["messages"][:2])]
        return {"messages": [sum(parts[1:], parts[0])]}

    graph = chain(("first", same), ("second", same), ("third", streamed), ("fourth", same))
    record(running(graph, "ainvoke"), lambda call: "the same")
    first, second, third, fourth = record.calls
    assert [call.parents for call in record.calls] == [(), (first.id,), (first.id,), (third.id,)]
    assert {call.candidates[0].text for call in (first, second, third, fourth)} == {"the same"}
