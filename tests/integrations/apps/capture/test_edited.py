"""Edited prompts in frameworks: of models on the OpenAI SDK and of their own, with their caches, and never twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import openai
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import CreateResult, RequestUsage, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.cache import ChatCompletionCache
from crewai import LLM, BaseLLM
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.messages import SystemMessage as LangSystem
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import cotune
from cotune.integrations.apps.activation import activate
from tests.integrations.autogen_models import CountlessClient, autogen_client
from tests.integrations.edits import NEW, OLD, part, prompts, with_edit
from tests.integrations.provider import Provider, json_reply, said

activate()
LOOKS = prompts(
    part(OLD, NEW),
    part("Looks.", "Looks far.", kind="tool", key="look"),
    part("Looks.", "Looks far.", role="writer", kind="tool", key="look"),
    part(OLD, NEW, role="writer"),
)


@tool
def look(city: str) -> str:
    """Looks."""
    return city


# LangChain


class Own(BaseChatModel):
    """A provider with a client of its own, which keeps what it is asked; its streams come from a `_stream`."""

    seen: list[Any]

    @property
    def _llm_type(self) -> str:
        return "own"

    def bind_tools(self, tools, **options):
        return self.bind(tools=[{"name": "look", "description": t.description, "input_schema": {}} for t in tools])

    def _generate(self, messages, stop=None, run_manager=None, **options):
        self.seen.append((messages, options))
        return ChatResult(generations=[ChatGeneration(message=AIMessage("fine"))])

    def _stream(self, messages, stop=None, run_manager=None, **options):
        self.seen.append((messages, options))
        for text in ("fi", "ne"):
            yield ChatGenerationChunk(message=AIMessageChunk(text))


class OverSdk(Own):
    """The same, which uses the OpenAI SDK all the same."""

    def _generate(self, messages, stop=None, run_manager=None, **options):
        self.seen.append((messages, options))
        roles = {"system": "system", "human": "user"}
        asked = [{"role": roles[message.type], "content": message.content} for message in messages]
        made = openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=asked)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(made.choices[0].message.content))])


def ways(model: Any, asked: list[Any]) -> Any:
    async def astream() -> list[Any]:
        return [chunk async for chunk in model.astream(asked)]

    return {
        "invoke": lambda: model.invoke(asked),
        "ainvoke": lambda: asyncio.run(model.ainvoke(asked)),
        "stream": lambda: list(model.stream(asked)),
        "astream": lambda: asyncio.run(astream()),
    }


WAYS = pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])


@WAYS
def test_langchain_on_the_sdk(way: str, provider: Provider) -> None:
    asked = [LangSystem(OLD), HumanMessage("hello")]
    model = ChatOpenAI(model="m", max_retries=0).bind_tools([look])
    for given in (None, LOOKS):
        with cotune.trace(prompts=given) as traced:
            ways(model, asked)[way]()
    assert provider.raw[1] == with_edit(with_edit(provider.raw[0]), "Looks.", "Looks far.")
    assert asked[0].content == OLD
    assert traced.calls[0].sent[0]["content"] == NEW


@WAYS
def test_langchain_with_a_client_of_its_own(way: str) -> None:
    kept = [
        LangSystem([{"type": "text", "text": OLD[:14]}, {"type": "text", "text": OLD[15:], "cache_control": {"x": 1}}])
    ]
    joined = prompts(part(f"{OLD[:14]}\n{OLD[15:]}", f"{OLD[:14]}\n{NEW}"), *LOOKS.parts[1:])
    asked = [*kept, HumanMessage("hello")]
    bare = Own(seen=[])
    with cotune.trace(prompts=joined) as traced:
        ways(bare.bind_tools([look]), asked)[way]()
    ((messages, options),) = bare.seen
    assert messages[0].content == [
        {"type": "text", "text": OLD[:14]},
        {"type": "text", "text": NEW, "cache_control": {"x": 1}},
    ]
    assert messages[1].content == "hello"
    assert options["tools"] == [{"name": "look", "description": "Looks far.", "input_schema": {}}]
    assert kept[0].content[1]["text"] == OLD[15:]
    (call,) = traced.calls
    assert (call.messages[0]["content"], call.sent[0]["content"]) == (f"{OLD[:14]}\n{OLD[15:]}", f"{OLD[:14]}\n{NEW}")
    assert (call.status, traced.warnings) == ("ok", {})


class Converse(Own):
    """The same, with tools in a form of its provider's own."""

    def bind_tools(self, tools, **options):
        schema = {"json": {"type": "object", "properties": {}}}
        spec = {"name": "look", "description": "Looks.", "inputSchema": schema}
        return self.bind(tools=[{"toolSpec": spec}])


def test_a_form_that_cannot_be_edited_goes_out_as_it_is_and_is_counted() -> None:
    bare = Converse(seen=[])
    with cotune.trace(prompts=LOOKS) as traced:
        bare.bind_tools([look]).invoke([LangSystem(OLD), HumanMessage("hello")])
    ((messages, options),) = bare.seen
    assert (messages[0].content, options["tools"][0]["toolSpec"]["description"]) == (OLD, "Looks.")
    (call,) = traced.calls
    assert (call.sent, call.record.unedited, call.record.sent_tools) == (call.messages, "prompt_unmatched", None)
    assert traced.warnings == {"prompt_unmatched": 1}


def test_what_the_class_has_edited_the_wire_does_not_edit_again(provider: Provider) -> None:
    """The new text reads like the old one: edited twice it would say the more twice."""
    grown = prompts(part([OLD, 1], [OLD, " More.", 1]))
    with cotune.trace(prompts=grown) as traced:
        OverSdk(seen=[]).invoke([LangSystem(OLD), HumanMessage("hello")])
    assert [request["messages"][0]["content"] for request in provider.requests] == [f"{OLD} More."]
    (call,) = traced.calls
    assert (call.messages[0]["content"], call.sent[0]["content"]) == (OLD, f"{OLD} More.")
    assert traced.warnings == {}


class Persistent(OverSdk):
    """The same, which asks again by itself where the first request fails, and once more with a reproach."""

    def _generate(self, messages, stop=None, run_manager=None, **options):
        with contextlib.suppress(openai.OpenAIError):
            super()._generate(messages)
        super()._generate(messages)
        return super()._generate([*messages, HumanMessage("Shorter.")])


def test_further_requests_of_a_class_are_not_edited_again(provider: Provider) -> None:
    provider.reply = lambda body, number: json_reply({"error": {}}, 500) if number == 0 else said(body)
    grown = prompts(part([OLD, 1], [OLD, " More.", 1]))
    with cotune.trace(prompts=grown) as traced:
        Persistent(seen=[]).invoke([LangSystem(OLD), HumanMessage("hello")])
    assert [request["messages"][0]["content"] for request in provider.requests] == [f"{OLD} More."] * 3
    assert [call.messages[0]["content"] for call in traced.calls] == [OLD] * 3
    assert [call.sent[0]["content"] for call in traced.calls] == [f"{OLD} More."] * 3
    assert traced.calls[2].messages[1:] == [{"role": "user", "content": text} for text in ("hello", "Shorter.")]
    assert traced.warnings == {}


def test_the_cache_of_langchain_is_left_aside(provider: Provider) -> None:
    cached = ChatOpenAI(model="m", max_retries=0, cache=InMemoryCache())
    asked = [LangSystem(OLD), HumanMessage("hello")]
    cached.invoke(asked)
    with cotune.trace(prompts=prompts()) as traced:
        cached.invoke(asked)
    assert [request["messages"][0]["content"] for request in provider.requests] == [OLD, NEW]
    assert traced.warnings == {"unused_cache": 2}
    cached.invoke(asked)
    assert len(provider.requests) == 2


# AutoGen


class OwnClient(CountlessClient):
    """A client of its own, which keeps what it is asked."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def create(self, messages, **options):
        self.seen.append((messages, options))
        return CreateResult(finish_reason="stop", content="fine", usage=RequestUsage(4, 2), cached=False)

    async def create_stream(self, messages, **options):
        yield "fi"
        yield await self.create(messages, **options)


def looking(city: str) -> str:
    return city


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_autogen(own: bool, stream: bool, provider: Provider) -> None:
    tools = [FunctionTool(looking, "Looks.", name="look")]
    client: Any = OwnClient() if own else autogen_client(max_retries=0)
    for given in (None, LOOKS):
        agent = AssistantAgent("writer", client, system_message=OLD, tools=tools, model_client_stream=stream)
        with cotune.trace(prompts=given) as traced:
            asyncio.run(agent.run(task="hello"))
        assert agent._system_messages == [SystemMessage(content=OLD)]
    (call,) = traced.calls
    assert (call.messages[0]["content"], call.sent[0]["content"], traced.warnings) == (OLD, NEW, {})
    if own:
        messages, options = client.seen[1]
        assert messages == [SystemMessage(content=NEW), UserMessage(content="hello", source="user")]
        assert [one["description"] for one in options["tools"]] == ["Looks far."]
    else:
        assert provider.raw[1] == with_edit(with_edit(provider.raw[0]), "Looks.", "Looks far.")


def test_the_cache_of_autogen_is_left_aside(provider: Provider) -> None:
    client = ChatCompletionCache(autogen_client(max_retries=0))
    asked = [SystemMessage(content=OLD), UserMessage(content="hello", source="user")]
    asyncio.run(client.create(asked))
    with cotune.trace(prompts=prompts()):
        asyncio.run(client.create(asked))
    assert [request["messages"][0]["content"] for request in provider.requests] == [OLD, NEW]


# CrewAI


class OwnModel(BaseLLM):
    """A provider with a client of its own, which keeps what it is asked."""

    def call(self, conversation, tools=None, *more, **options):
        self.__dict__.setdefault("kept", []).append((conversation, tools))
        return "fine"

    async def acall(self, conversation, *more, **options):
        return self.call(conversation, *more, **options)


@pytest.mark.parametrize("way", ["call", "acall"])
def test_crewai(way: str, provider: Provider) -> None:
    asked = [{"role": "system", "content": OLD}, {"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]

    def ask(model: Any, **more: Any) -> Any:
        found = getattr(model, way)(asked, **more)
        return asyncio.run(found) if way == "acall" else found

    own = OwnModel(model="own")
    with cotune.trace(prompts=LOOKS) as traced:
        ask(own, tools=tools)
    ((messages, offered),) = own.__dict__["kept"]
    assert messages == [{"role": "system", "content": NEW}, asked[1]]
    assert offered[0]["function"]["description"] == "Looks far."
    assert tools[0]["function"]["description"] == "Looks."
    assert (asked[0]["content"], traced.calls[0].sent[0]["content"]) == (OLD, NEW)
    for given in (None, prompts()):
        with cotune.trace(prompts=given):
            ask(LLM(model="gpt-4o-mini"))
    assert provider.raw[1] == with_edit(provider.raw[0])
