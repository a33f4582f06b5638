"""AutoGen model clients: the proxy that names their owner, and clients that do not use the OpenAI SDK."""

from __future__ import annotations

import asyncio
import copy
import warnings
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken, FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient
from openai import BadRequestError
from PIL import Image as Picture
from pydantic import BaseModel

from cotune.integrations.apps.activation import activate
from cotune.integrations.apps.autogen.messages import answer_of_result, request_of, result_of
from cotune.integrations.apps.autogen.models import silence_mismatch
from cotune.recording.context import current_episode
from tests.integrations.autogen_models import SEEING, CountlessClient, autogen_client
from tests.integrations.provider import Provider, json_reply
from tests.integrations.recorded import POLICY, Recorded, answer, asks, tool_call

activate()


class OwnClient(CountlessClient):
    """A client of its own: says `own <last message>`, fails on "fail", waits for ever on "hang"."""

    model = "own-1"

    def __init__(self) -> None:
        self.asked = 0

    async def create(self, messages, **options):
        self.asked += 1
        said = messages[-1].content
        if said == "fail":
            raise ConnectionError("gone")
        if said == "hang":
            hanging = asyncio.ensure_future(asyncio.Event().wait())
            options["cancellation_token"].link_future(hanging)
            await hanging
        return CreateResult(
            finish_reason="stop", content=f"own {said}", usage=RequestUsage(4, 2), cached=False, thought="hm"
        )

    async def create_stream(self, messages, **options):
        yield "own "
        await asyncio.sleep(0)
        yield await self.create(messages, **options)


class Wrapper(OwnClient):
    """Asks another client, which uses the SDK, behind a class that nobody knows."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def create(self, messages, **options):
        return await self.inner.create(messages, **options)

    async def create_stream(self, messages, **options):
        async for part in self.inner.create_stream(messages, **options):
            yield part


def solo(model: Any, task: str = "hi", stream: bool = False) -> Any:
    async def solve(_: Any) -> float:
        writer = AssistantAgent("writer", model, model_client_stream=stream)
        return float(len((await writer.run(task=task)).messages[-1].content))

    return solve


STREAMS = pytest.mark.parametrize("stream", [False, True])


@STREAMS
def test_another_client_is_recorded_once(record: Recorded, stream: bool):
    assert record(solo(OwnClient(), stream=stream)).rewards == {"team": 6.0}
    (call,) = record.calls
    assert (call.role, call.status, call.policy, call.model, call.streamed) == ("writer", "ok", None, "own-1", stream)
    assert call.candidates[0].message == {"role": "assistant", "content": "own hi", "reasoning_content": "hm"}
    assert (call.usage.prompt_tokens, call.usage.completion_tokens) == (4, 2)


def test_messages_may_be_named(record: Recorded):
    async def solve(_: Any) -> float:
        client = OwnClient()
        whole = await client.create(messages=[UserMessage(content="hi", source="user")])
        (*_, last) = [part async for part in client.create_stream(messages=[UserMessage(content="hi", source="user")])]
        return float((whole.content, last.content) == ("yes", "yes"))

    assert record(solve, lambda call: "yes").rewards == {"team": 1.0}
    assert [call.status for call in record.calls] == ["ok", "ok"]


@STREAMS
def test_another_client_is_answered_in_its_place(record: Recorded, stream: bool):
    model = OwnClient()
    record(solo(model, stream=stream), lambda call: answer("no", "yes!", chosen=1))
    (call,) = record.calls
    assert (model.asked, call.chosen, call.policy, len(call.candidates)) == (0, 1, POLICY, 2)
    assert call.candidates[1].text == "yes!"


@STREAMS
def test_a_wrapper_around_the_sdk_is_one_call_as_it_went_over_the_wire(
    provider: Provider, record: Recorded, stream: bool
):
    record(solo(Wrapper(autogen_client()), stream=stream))
    (call,) = record.calls
    assert (call.role, call.model, call.candidates[0].text) == ("writer", "m", "re: hi")
    assert len(provider.requests) == 1


@STREAMS
def test_a_wrapper_around_the_sdk_is_answered_once(nowhere: None, record: Recorded, stream: bool):
    record(solo(Wrapper(autogen_client()), stream=stream), lambda call: "yes")
    assert [call.candidates[0].text for call in record.calls] == ["yes"]


@STREAMS
def test_replay_clients_are_recorded(record: Recorded, stream: bool):
    async def solve(_):
        model = ReplayChatCompletionClient(["one two", "three"])
        team = RoundRobinGroupChat(
            [AssistantAgent(name, model, model_client_stream=stream) for name in ("a", "b")], max_turns=2
        )
        return float(len((await team.run(task="hi")).messages))

    record(solve)
    assert [(call.role, call.candidates[0].text) for call in record.calls] == [("a", "one two"), ("b", "three")]
    assert record.calls[1].parents == (record.calls[0].id,)


def test_function_calls_of_another_client_reach_the_app(record: Recorded):
    async def solve(_):
        def look(q: str) -> str:
            return f"found {q}"

        model = ReplayChatCompletionClient(
            [
                CreateResult(
                    finish_reason="function_calls",
                    content=[FunctionCall(id="c1", name="look", arguments='{"q": "x"}')],
                    usage=RequestUsage(1, 1),
                    cached=False,
                    thought="I look",
                ),
                "done",
            ],
            SEEING,
        )
        writer = AssistantAgent("writer", model, tools=[look], reflect_on_tool_use=True)
        return float((await writer.run(task="hi")).messages[-1].content == "done")

    assert record(solve).rewards == {"team": 1.0}
    assert record.calls[0].candidates[0].tool_calls == [tool_call("look", {"q": "x"}, "c1")]
    assert record.calls[0].candidates[0].finish_reason == "tool_calls"
    assert record.calls[1].parents == (record.calls[0].id,)
    assert "tools" not in record.calls[1].params


@STREAMS
def test_function_calls_of_the_policy_reach_the_app(record: Recorded, stream: bool):
    said = []

    async def solve(_):
        def look(q: str) -> str:
            return f"found {q}"

        writer = AssistantAgent(
            "writer", OwnClient(), tools=[look], reflect_on_tool_use=True, model_client_stream=stream
        )
        said.extend((await writer.run(task="hi")).messages)
        return 1.0

    record(solve, lambda call: asks(tool_call("look", {"q": "x"})) if call.turn == 0 else "done")
    assert [m.content for m in said if m.type in ("ToolCallExecutionEvent", "TextMessage")][1][0].content == "found x"


@STREAMS
def test_an_error_is_recorded_and_reaches_the_app(record: Recorded, stream: bool):
    async def solve(task):
        with pytest.raises(ConnectionError, match="gone"):
            await solo(OwnClient(), "fail", stream)(task)
        return 0.0

    record(solve)
    assert [(call.status, call.error) for call in record.calls] == [("error", "ConnectionError: gone")]


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_a_cancellation_token_cancels_the_call(provider: Provider, record: Recorded, own: bool, answered: bool):
    async def hang(call):
        await asyncio.Event().wait()

    provider.reply = lambda body, number: (200, "application/json", [Provider.HANG])

    async def solve(_):
        token = CancellationToken()
        writer = AssistantAgent("writer", OwnClient() if own else autogen_client())
        running = asyncio.ensure_future(writer.run(task="hang", cancellation_token=token))
        while not current_episode.get()._open:
            await asyncio.sleep(0)
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return 0.0

    record(solve, hang if answered else None)
    assert record.statuses == ["cancelled"]


def test_a_stream_left_half_read_is_cancelled(record: Recorded):
    async def solve(_):
        stream = AssistantAgent("writer", OwnClient(), model_client_stream=True).run_stream(task="hi")
        async for event in stream:
            if event.type == "ModelClientStreamingChunkEvent":
                break
        await stream.aclose()
        while current_episode.get()._open:
            await asyncio.sleep(0)
        return 0.0

    record(solve)
    assert record.statuses == ["cancelled"]
    assert (record.calls[0].candidates[0].text, record.calls[0].candidates[0].finish_reason) == ("own ", "interrupted")


def test_what_the_provider_refuses_reaches_the_app_as_it_is(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: json_reply({"error": {"message": "no", "code": 400}}, 400)
    seen = []

    async def solve(task):
        with pytest.raises(BadRequestError) as error:
            await solo(autogen_client())(task)
        seen.append(error.value.message)
        return 0.0

    record(solve)
    asyncio.run(solve(None))
    assert len(seen) == 2 and seen[0] == seen[1]
    assert record.statuses == ["error"]


@STREAMS
def test_a_cache_is_left_aside_where_policies_answer(provider: Provider, record: Recorded, stream: bool):
    cached = ChatCompletionCache(autogen_client())

    async def solve(task):
        return await solo(cached, stream=stream)(task) + await solo(cached, stream=stream)(task)

    outcome = record(solve, lambda call: "said")
    assert (len(record.calls), provider.requests, cached.store.store) == (2, [], {})
    assert outcome.live.warnings["unused_cache"] == 2


@STREAMS
def test_an_answer_from_a_cache_is_counted_and_no_call(provider: Provider, record: Recorded, stream: bool):
    cached = ChatCompletionCache(autogen_client())

    async def solve(task):
        return await solo(cached, stream=stream)(task) + await solo(cached, stream=stream)(task)

    outcome = record(solve)
    assert (len(record.calls), len(provider.requests)) == (1, 1)
    assert outcome.live.warnings == {"unseen_call": 1}


def test_the_proxy_is_the_client_in_all_else(record: Recorded):
    model = OwnClient()
    outside = AssistantAgent("writer", model)

    async def solve(_):
        proxy = outside._model_client
        assert type(proxy) is not OwnClient
        assert isinstance(proxy, OwnClient) and isinstance(proxy, ChatCompletionClient)
        assert (proxy == model, hash(proxy) == hash(model), repr(proxy) == repr(model)) == (True, True, True)
        proxy.extra = 3
        assert (model.extra, proxy.extra, proxy.model_info, proxy.remaining_tokens([])) == (3, 3, SEEING, 7)
        del proxy.extra
        assert not hasattr(model, "extra")
        assert type(copy.copy(proxy)) is OwnClient
        inner = AssistantAgent("inner", outside._model_client)
        assert vars(inner)["_model_client"] is model
        outside._model_client = proxy
        assert vars(outside)["_model_client"] is model
        return 1.0

    record(solve)
    assert outside._model_client is model
    with pytest.raises(AttributeError):
        _ = AssistantAgent._model_client


def test_no_warning_of_the_name_of_a_model_that_a_policy_answers_for(nowhere: None, record: Recorded):
    agent = AssistantAgent("a", model_client=OpenAIChatCompletionClient(model="gpt-4o"))

    async def solve(_: Any) -> float:
        return float(len((await agent.run(task="hi")).messages))

    silence_mismatch.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record(solve, lambda call: "hello")
    assert not [one for one in caught if "mismatch" in str(one.message)]


def test_components_dump_and_load_within_an_episode(nowhere: None, record: Recorded):
    async def solve(_):
        team = RoundRobinGroupChat([AssistantAgent("a", autogen_client(api_key="k"))], max_turns=1)
        dumped = team.dump_component()
        again = RoundRobinGroupChat.load_component(dumped)
        inner = dumped.config["participants"][0]["config"]["model_client"]
        assert inner["provider"].endswith("OpenAIChatCompletionClient")
        await again.run(task="hi")
        return 1.0

    record(solve, lambda call: "x")
    assert record.roles == ["a"]


def test_a_request_in_openai_form():
    class Reply(BaseModel):
        value: int

    def look(q: str) -> str:
        """Look."""
        return q

    tool = FunctionTool(look, "Look.")
    picture = Image(Picture.new("RGB", (1, 1)))
    call = FunctionCall(id="c1", name="look", arguments='{"q": "x"}')
    messages = [
        SystemMessage(content="be"),
        UserMessage(content=["see", picture], source="user"),
        AssistantMessage(content=[call], source="a", thought="hm"),
        FunctionExecutionResultMessage(
            content=[FunctionExecutionResult(content="r", name="look", call_id="c1", is_error=False)]
        ),
        AssistantMessage(content="so", source="a"),
    ]
    options = {
        "tools": [tool],
        "tool_choice": tool,
        "json_output": Reply,
        "extra_create_args": {"temperature": 0.5},
        "cancellation_token": CancellationToken(),
    }
    body = request_of(OwnClient(), messages, options)
    assert body["messages"] == [
        {"role": "system", "content": "be"},
        {
            "role": "user",
            "name": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": picture.data_uri, "detail": "auto"}},
            ],
        },
        {"role": "assistant", "content": "hm", "tool_calls": [tool_call("look", {"q": "x"}, "c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": "so"},
    ]
    assert body["tools"][0]["function"]["name"] == "look"
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert body["response_format"]["json_schema"]["name"] == "Reply"
    assert (body["model"], body["temperature"]) == ("own-1", 0.5)
    assert "cancellation_token" not in body


@pytest.mark.parametrize(
    "result",
    [
        CreateResult(finish_reason="stop", content="x", usage=RequestUsage(1, 2), cached=False),
        CreateResult(finish_reason="length", content="x", usage=RequestUsage(1, 2), cached=False, thought="hm"),
        CreateResult(
            finish_reason="function_calls",
            content=[FunctionCall(id="c", name="f", arguments="{}")],
            usage=RequestUsage(1, 2),
            cached=False,
            thought="hm",
        ),
    ],
)
def test_results_survive_the_way_there_and_back(result: CreateResult):
    assert result_of(answer_of_result(result)) == result


def test_no_result_is_malformed():
    with pytest.raises(ValueError, match="no CreateResult"):
        answer_of_result("x")
