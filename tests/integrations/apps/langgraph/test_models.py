"""Chat models of LangChain that do not use the OpenAI SDK, and models that use it behind another class."""

from __future__ import annotations

import asyncio
import inspect

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from cotune.errors import SamplerError, WorkflowError
from cotune.integrations.apps.activation import activate
from cotune.records.structs import Message
from tests.integrations.provider import Provider
from tests.integrations.recorded import POLICY, Recorded, asks, tool_call

activate()


class Own(BaseChatModel):
    """A provider with a client of its own. Says `own <last message>`; fails on "fail"."""

    @property
    def _llm_type(self) -> str:
        return "own"

    def bind_tools(self, tools, **options):
        return self.bind(tools=[convert_to_openai_tool(t) for t in tools], **options)

    def _generate(self, messages, stop=None, run_manager=None, **options):
        if messages[-1].content == "fail":
            raise ConnectionError("gone")
        usage = {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6}
        message = AIMessage(f"own {messages[-1].content}", usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


class Streaming(Own):
    def _stream(self, messages, stop=None, run_manager=None, **options):
        for part in ("own ", str(messages[-1].content)):
            yield ChatGenerationChunk(message=AIMessageChunk(part))


class Async(Streaming):
    async def _agenerate(self, messages, stop=None, run_manager=None, **options):
        await asyncio.sleep(0)
        return self._generate(messages)

    async def _astream(self, messages, stop=None, run_manager=None, **options):
        for chunk in self._stream(messages):
            await asyncio.sleep(0)
            yield chunk


class Wired(Own):
    """Goes over the OpenAI SDK, in a class that nobody knows."""

    url: str

    def _generate(self, messages, stop=None, run_manager=None, **options):
        with openai.OpenAI(base_url=self.url, api_key="none", max_retries=0) as client:
            body = [{"role": "user", "content": f"wired {messages[-1].content}"}]
            text = client.chat.completions.create(model="w", messages=body).choices[0].message.content
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


@tool
def look(q: str) -> str:
    """Look something up."""
    return "42"


WAYS = ("invoke", "ainvoke", "stream", "astream")


def through(model, way):
    """A workflow of one node that calls the model in this way and returns the number of characters it said."""

    async def node(state):
        if way == "invoke":
            said = [model.invoke(state["messages"])]
        elif way == "ainvoke":
            said = [await model.ainvoke(state["messages"])]
        elif way == "stream":
            said = list(model.stream(state["messages"]))
        else:
            said = [part async for part in model.astream(state["messages"])]
        return {"messages": [AIMessage("".join(part.content for part in said))]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    graph = builder.compile()

    async def run(task):
        return len((await graph.ainvoke({"messages": [("user", "hi")]}))["messages"][-1].content)

    return run


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_options_may_have_any_name(record: Recorded, way: str, answered: bool):
    model = Async().bind(model="other", call=1, answer=2, original=3, args=4)
    record(through(model, way), (lambda call: "yes") if answered else None)
    (made,) = record.calls
    assert (made.status, made.model, made.params["call"], made.params["answer"]) == ("ok", "other", 1, 2)
    assert made.candidates[0].text == ("yes" if answered else "own hi")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Own, Streaming, Async])
def test_records_each_call_once(record: Recorded, cls: type[BaseChatModel], way: str):
    assert record(through(cls(), way)).rewards == {"team": 6.0}
    (call,) = record.calls
    assert (call.role, call.status, call.policy, call.model) == ("node", "ok", None, cls.__name__)
    assert call.candidates[0].text == "own hi"
    assert call.candidates[0].message == {"role": "assistant", "content": "own hi"}
    assert [r.body for r in record.sink if isinstance(r, Message)] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Own, Streaming, Async])
def test_answers_each_call_once(record: Recorded, cls: type[BaseChatModel], way: str):
    assert record(through(cls(), way), lambda call: "from the policy").rewards == {"team": 15.0}
    (call,) = record.calls
    assert (call.role, call.status, call.policy) == ("node", "ok", POLICY)


def test_usage_is_recorded(record: Recorded):
    record(through(Own(), "ainvoke"))
    assert (record.calls[0].usage.prompt_tokens, record.calls[0].usage.completion_tokens) == (4, 2)


def test_tools_are_bound_called_and_answered(record: Recorded):
    agent = create_agent(Own(), [look], name="looker")

    def run(task):
        messages = agent.invoke({"messages": [("user", "hi")]})["messages"]
        assert [m.type for m in messages] == ["human", "ai", "tool", "ai"]
        return 1

    record(run, lambda call: asks(tool_call("look", {"q": "x"})) if call.turn == 0 else "done")
    first, second = record.calls
    assert second.parents == (first.id,)
    bodies = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    assert bodies[first.tools][0]["function"]["name"] == "look"
    assert [bodies[m]["role"] for m in second.messages] == ["user", "assistant", "tool"]
    assert bodies[second.messages[1]]["tool_calls"] == [tool_call("look", {"q": "x"})]


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_malformed_tool_call_reaches_the_application_as_such(record: Recorded, way: str):
    broken = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "nonsense"}}

    def run(task):
        model = Streaming().bind_tools([look])
        said = model.invoke("x") if way == "invoke" else sum(list(model.stream("x")), AIMessageChunk(""))
        return len(said.invalid_tool_calls)

    assert record(run, lambda call: asks(broken)).rewards == {"team": 1.0}


def test_structured_output(record: Recorded):
    class Point(BaseModel):
        """A point."""

        x: int

    def run(task):
        return Own().with_structured_output(Point).invoke("where").x

    assert record(run, lambda call: asks(tool_call("Point", {"x": 4}))).rewards == {"team": 4.0}


def test_a_wire_request_of_the_sdk_is_the_record(provider: Provider, record: Recorded):
    assert record(through(Wired(url=provider.url), "ainvoke")).rewards == {"team": 12.0}
    (call,) = record.calls
    assert (call.role, call.model, call.candidates[0].text) == ("node", "w", "re: wired hi")


def test_failures_are_recorded_and_raised_as_they_were(record: Recorded):
    def run(task):
        with pytest.raises(ConnectionError, match="gone"):
            Own().invoke("fail")
        return 1

    assert record(run).live.failures == {"error": 1}
    assert record.calls[0].error == "ConnectionError: gone"


def test_errors_of_the_sampler_and_of_scorers(record: Recorded):
    def run(task):
        try:
            Own().invoke("x")
        except (SamplerError, WorkflowError):
            return 0

    def refuse(error):
        def reply(call):
            raise error

        return reply

    assert record(run, refuse(SamplerError("too long"))).live.failures == {"error": 1}
    outcome = record.any(run, refuse(WorkflowError("bad scorer")))
    assert str(outcome.error) == "bad scorer"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_stream_that_the_application_leaves_is_cancelled(record: Recorded, way: str):
    def run(task):
        stream = Streaming().stream("x")
        next(stream)
        stream.close()
        return 1

    async def run_async(task):
        stream = Async().astream("x")
        await anext(stream)
        await stream.aclose()
        return 1

    record(run if way == "sync" else run_async)
    assert record.statuses == ["cancelled"]


def test_a_call_between_two_chunks_is_its_own(record: Recorded):
    def run(task):
        for part in Streaming().stream("outer"):
            Own().invoke(f"after {part.content}".strip())
        return 1

    record(run)
    texts = sorted(call.candidates[0].text for call in record.calls)
    assert [t for t in texts if t != "own "] == texts
    assert "own outer" in texts
    assert "own after own" in texts


def test_outside_an_episode_and_for_later_classes(record: Recorded):
    class Later(Own):
        def _generate(self, messages, stop=None, run_manager=None, **options):
            return ChatResult(generations=[ChatGeneration(message=AIMessage("later"))])

    assert Later().invoke("x").content == "later"
    assert [p.content for p in Streaming().stream("x") if p.content] == ["own ", "x"]
    assert record(lambda task: len(Later().invoke("x").content), lambda call: "x").rewards == {"team": 1.0}
    assert "run_manager" in inspect.signature(Later._generate).parameters
    assert len(record.calls) == 1


def test_a_request_that_cannot_be_read_goes_its_way_and_is_counted(record: Recorded, monkeypatch: pytest.MonkeyPatch):
    def unreadable(*args):
        raise TypeError("a part that nobody knows")

    monkeypatch.setattr("cotune.integrations.apps.langchain.models.request_of", unreadable)
    outcome = record(lambda task: Own().invoke("hello").content == "own hello")
    assert outcome.rewards == {"team": 1.0}
    assert (record.calls, outcome.live.warnings["unread_call"]) == ([], 1)
