"""Failures: recorded with their status, never trained on, counted; the application sees what it would have seen."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI

from cotune.algorithms.collect import collect
from cotune.cli.main import is_worth_showing
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import Provider, completion, event, json_reply, serving
from tests.integrations.provider import said as answered
from tests.integrations.recorded import Recorded, Sink, episode

USER = [{"role": "user", "content": "hello"}]
SSE = "text/event-stream"
BUSY = {"error": {"message": "slow down", "code": "rate"}}
LONGER = "\r\ncontent-length: 9999"
"""Announces more than is sent: the connection breaks within the body."""

FAILURES: dict[str, tuple[Callable[[bool], tuple[int, str, list[Any]]], str]] = {
    "429": (lambda stream: json_reply(BUSY, 429), "error"),
    "500": (lambda stream: json_reply(BUSY, 500), "error"),
    "400": (lambda stream: json_reply({"error": {"message": "too long"}}, 400), "error"),
    "500 without JSON": (lambda stream: (500, "text/html", [b"<h1>gateway</h1>"]), "error"),
    "not JSON": (lambda stream: (200, SSE, [b"data: {oops\n\n"]) if stream else (200, "application/json", [b"{oops"]),
                 "malformed"),
    "HTML": (lambda stream: (200, "text/html", [b"<h1>hello</h1>"]), "malformed"),
    "no choices": (lambda stream: (200, SSE, [b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"]) if stream
                   else json_reply({"object": "chat.completion", "choices": []}), "malformed"),
    "error event": (lambda stream: (200, SSE, [event({"content": "ab"}), b'data: {"error": {"message": "lost"}}\n\n'])
                    if stream else json_reply(BUSY, 503), "malformed or error"),
    "cut off": (lambda stream: (200, SSE, [event({"content": "ab"})]) if stream
                else (200, "application/json", [b'{"choices": [']), "malformed"),
    "reset": (lambda stream: (200, SSE + LONGER, [event({"content": "ab"}), Provider.CUT]) if stream
              else (200, "application/json" + LONGER, [b'{"choices": [', Provider.CUT]), "error"),
    "time-out": (lambda stream: (200, SSE, [event({"content": "ab"}), Provider.HANG]) if stream
                 else (200, "application/json", [Provider.HANG]), "timeout"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Iterator[Provider]:
    with serving() as made:
        yield made


class Clients:
    """Eight ways to ask once, by name: each a coroutine function that returns what the application got."""

    def __init__(self, url: str, failure: str = "time-out") -> None:
        patience = 0.6 if failure == "time-out" else 30.0  # a busy machine sends the first piece in less
        settings = {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": patience}
        self.sync, self.other = openai.OpenAI(**settings), openai.AsyncOpenAI(**settings)
        self.chat = ChatOpenAI(model="m", **settings)

    async def openai_sync(self) -> Any:
        return self.sync.chat.completions.create(model="m", messages=USER)

    async def openai_async(self) -> Any:
        return await self.other.chat.completions.create(model="m", messages=USER)

    async def openai_stream(self) -> Any:
        return [*self.sync.chat.completions.create(model="m", messages=USER, stream=True)]

    async def openai_async_stream(self) -> Any:
        return [c async for c in await self.other.chat.completions.create(model="m", messages=USER, stream=True)]

    async def langchain_invoke(self) -> Any:
        return self.chat.invoke("hello").content

    async def langchain_ainvoke(self) -> Any:
        return (await self.chat.ainvoke("hello")).content

    async def langchain_stream(self) -> Any:
        return [chunk.content for chunk in self.chat.stream("hello")]

    async def langchain_astream(self) -> Any:
        return [chunk.content async for chunk in self.chat.astream("hello")]


WAYS = [name for name in vars(Clients) if name.startswith(("openai", "langchain"))]


async def met(ask: Callable[[], Any]) -> Any:
    """What an application meets: an answer, or an exception by type, message, status and body."""
    try:
        return await ask()
    except Exception as error:  # noqa: BLE001
        facts = [getattr(error, name, None) for name in ("status_code", "code", "body", "type", "request_id")]
        return [type(error), str(error), *facts, type(error.__cause__)]


@pytest.mark.parametrize("failure", FAILURES)
def test_the_application_sees_what_it_would_have_seen(shared: Provider, failure: str):
    reply, expected = FAILURES[failure]
    shared.reply = lambda body, number: reply(bool(body.get("stream")))
    sink = Sink()

    async def main() -> None:
        clients = Clients(shared.url, failure)
        for way in WAYS:
            ask = getattr(clients, way)
            plain, seen = await met(ask), []

            async def run(task, ask=ask, seen=seen):
                seen.append(await met(ask))
                return 1

            await episode(run, None, sink)
            assert seen == [plain], way
        clients.sync.close()
        await clients.other.close()

    asyncio.run(main())
    calls = [r for r in sink if hasattr(r, "turn")]
    assert len(calls) == len(WAYS)
    for way, call in zip(WAYS, calls, strict=True):
        streamed = "stream" in way
        status = {"malformed or error": "malformed" if streamed else "error"}.get(expected, expected)
        assert (call.status, call.streamed, call.attempts) == (status, streamed, ()), way
        assert call.error, way
        partial = streamed and failure in ("error event", "cut off", "reset", "time-out")
        said = [(c.text, c.finish_reason) for c in call.candidates]
        assert said == ([("ab", "interrupted")] if partial else []), way


@pytest.mark.parametrize("failure", FAILURES)
def test_a_provider_that_fails_is_no_fault_of_the_policies(shared: Provider, failure: str):
    """Nor is what the application makes of it, also after another call was answered where the client itself raised. A
    refused request is their fault."""
    reply, _ = FAILURES[failure]

    async def main() -> None:
        clients = Clients(shared.url, failure)
        for way in WAYS:

            async def run(task, way=way):
                shared.reply = lambda body, number: reply(bool(body.get("stream")))
                try:
                    said = await getattr(clients, way)()
                    raise RuntimeError("nothing in it") if len(said or "") < 3 else AssertionError
                except Exception as error:
                    if failure in ("429", "500", "400", "500 without JSON", "reset", "time-out"):
                        shared.reply = answered
                        await clients.openai_async()
                    raise ValueError("no answer") from error

            blame = (await episode(run)).episode.blame
            assert blame == ("policy" if failure == "400" else "infrastructure"), way
        clients.sync.close()
        await clients.other.close()

    asyncio.run(main())


def test_no_failure_is_trained_on_and_each_is_counted_by_its_reason(shared: Provider, tmp_path):
    ways = ("openai_async", "openai_async_stream")
    with SqliteStore.open(tmp_path) as store:

        async def main() -> None:
            for failure, (reply, _) in FAILURES.items():
                clients = Clients(shared.url, failure)
                shared.reply = lambda body, number, reply=reply: reply(bool(body.get("stream")))

                async def run(task, clients=clients):
                    for way in ways:
                        await met(getattr(clients, way))
                    return 1

                await episode(run, None, store)
                await clients.other.close()

        asyncio.run(main())
        store.flush()
        collected = collect(store, store.episodes(), plan="independent")
    assert collected.samples == []
    assert collected.left_out == {"failed_call": 8 + 2 + 1, "malformed_call": 8 + 1, "timed_out_call": 2}


def test_attempts_are_listed_with_status_and_cause(shared: Provider, record: Recorded, monkeypatch):
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *args: 0.0)
    replies = [json_reply(BUSY, 429), (200, "application/json", [Provider.HANG]), json_reply(BUSY, 503)]
    begin = len(shared.requests)
    shared.reply = lambda body, number: replies[number - begin]
    with openai.OpenAI(base_url=shared.url, api_key="none", max_retries=2, timeout=2.0) as client:

        def run(task):
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model="m", messages=USER)
            return {"team": 0, "metrics": {"status": caught.value.status_code}}

        outcome = record(run)
    (call,) = record.calls
    assert outcome.episode.metrics == {"status": 503.0}
    assert call.attempts == ("error: HTTP 429 Too Many Requests", "timeout: ReadTimeout: timed out")
    assert call.status == "error"
    assert call.error.startswith("InternalServerError: Error code: 503")


# Streams that are not read to their end


def letters(n: int = 3) -> list[Any]:
    return [event({"content": letter}) for letter in "abcdef"[:n]]


HALF_READ = ["for loop", "with", "async for", "async with", "kept open", "LangChain", "LangChain async", "exception"]


@pytest.mark.parametrize("way", HALF_READ)
def test_a_half_read_stream_keeps_what_was_read(shared: Provider, record: Recorded, way: str):
    shared.reply = lambda body, number: (200, SSE, [*letters(), Provider.HANG])
    kept: list[Any] = []

    async def run(task):
        clients = Clients(shared.url, "half-read")
        ask = functools.partial(clients.sync.chat.completions.create, model="m", messages=USER, stream=True)
        aask = functools.partial(clients.other.chat.completions.create, model="m", messages=USER, stream=True)
        said = ""
        if way in ("for loop", "kept open", "exception", "with"):
            stream = ask()
            if way == "kept open":
                kept.append(stream)
            try:
                for chunk in stream:
                    said += chunk.choices[0].delta.content or ""
                    if said == "abc":
                        if way == "exception":
                            raise LookupError("enough")
                        break
            except LookupError:
                pass
            if way == "with":
                stream.close()
        elif way.startswith("async"):
            stream = await aask()
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                if said == "abc":
                    break
            if way == "async with":
                await stream.close()
        elif way == "LangChain":
            for chunk in clients.chat.stream("hello"):
                said += chunk.content
                if said == "abc":
                    break
        else:
            async for chunk in clients.chat.astream("hello"):
                said += chunk.content
                if said == "abc":
                    break
        return len(said)

    outcome = record(run)
    assert outcome.rewards == {"team": 3.0}
    (call,) = record.calls
    assert call.status == "cancelled"
    assert [(c.text, c.finish_reason) for c in call.candidates] == [("abc", "interrupted")]
    assert outcome.live.failures == {"cancelled": 1}
    for stream in kept:
        stream.close()
    assert len(record.calls) == 1


def test_a_cancelled_stream_keeps_what_was_read(shared: Provider, record: Recorded):
    shared.reply = lambda body, number: (200, SSE, [*letters(2), Provider.HANG])

    async def run(task):
        heard = asyncio.Event()
        client = openai.AsyncOpenAI(base_url=shared.url, api_key="none", max_retries=0)

        async def listen():
            async for chunk in await client.chat.completions.create(model="m", messages=USER, stream=True):
                if chunk.choices[0].delta.content == "b":
                    heard.set()

        listening = asyncio.create_task(listen())
        await heard.wait()
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        return 1

    record(run)
    assert [(c.status, c.candidates[0].text) for c in record.calls] == [("cancelled", "ab")]


class Own(BaseChatModel):
    """A chat model without the OpenAI SDK, whose stream may break."""

    breaks: bool = False

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs) -> ChatResult:
        raise ConnectionError("no line")

    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        for letter in "ab":
            yield ChatGenerationChunk(message=AIMessageChunk(content=letter))
        if self.breaks:
            raise TimeoutError("too slow")
        yield ChatGenerationChunk(message=AIMessageChunk(content="c"))


def test_a_chat_model_of_its_own(record: Recorded):
    def run(task):
        with pytest.raises(ConnectionError, match=r"^no line$"):
            Own().invoke("x")
        with pytest.raises(TimeoutError, match=r"^too slow$"):
            list(Own(breaks=True).stream("x"))
        for chunk in Own().stream("x"):
            if chunk.content == "b":
                break
        return 1

    record(run)
    assert [(c.status, [x.text for x in c.candidates]) for c in record.calls] == [
        ("error", []), ("timeout", ["ab"]), ("cancelled", ["ab"]),
    ]  # fmt: skip


# Episodes


def test_an_exception_in_a_node(shared: Provider, record: Recorded):
    from langgraph.graph import START, MessagesState, StateGraph

    shared.reply = lambda body, number: json_reply(completion({"role": "assistant", "content": "fine"}))
    model = ChatOpenAI(model="m", base_url=shared.url, api_key="none", max_retries=0)

    def broken(state):
        model.invoke("from the node")
        raise LookupError("no such tool")

    builder = StateGraph(MessagesState)
    builder.add_node("worker", broken)
    builder.add_edge(START, "worker")
    graph = builder.compile()
    with pytest.raises(LookupError, match="no such tool"):
        graph.invoke({"messages": []})
    outcome = record.any(lambda task: graph.invoke({"messages": []}))
    assert type(outcome.error.__cause__) is LookupError
    assert outcome.episode.status == "error"
    assert "LookupError: no such tool" in outcome.episode.error
    assert [(c.role, c.status) for c in record.calls] == [("worker", "ok")]


def test_a_workflow_that_is_cancelled_from_outside(shared: Provider):
    shared.reply = lambda body, number: (200, "application/json", [Provider.HANG])
    sink = Sink()
    begin = len(shared.requests)

    async def run(task):
        client = openai.AsyncOpenAI(base_url=shared.url, api_key="none", max_retries=0)
        await client.chat.completions.create(model="m", messages=USER)

    async def main():
        running = asyncio.create_task(episode(run, None, sink))
        while len(shared.requests) == begin:
            await asyncio.to_thread(shared.over.wait, 0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert [c.status for c in sink.calls()] == ["cancelled"]
    assert [r.status for r in sink if hasattr(r, "metrics")] == ["cancelled"]


def test_a_stopped_episode_tells_its_calls_why_and_what_it_still_says_is_not_shown(nowhere: None) -> None:
    """In a thread, which cannot be stopped: the open call ends, further ones are refused, and frameworks log both."""
    asked, ended = threading.Event(), threading.Event()
    texts: list[str] = []
    shown: list[str] = []

    async def hangs(call: Any) -> str:
        asked.set()
        await asyncio.sleep(60)
        return "never"

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.name)

    handler = Shown()
    handler.addFilter(is_worth_showing)

    def solve(task: Any) -> float:
        client = openai.OpenAI(api_key="none", max_retries=0)
        for _ in range(2):
            try:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            except openai.APIStatusError as error:
                texts.append(error.message)
        handler.handle(logging.makeLogRecord({"name": "crew"}))
        handler.handle(logging.makeLogRecord({"name": "cotune.x"}))
        ended.set()
        return 1.0

    async def run() -> None:
        running = asyncio.ensure_future(episode(solve, hangs))
        await asyncio.to_thread(asked.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.to_thread(ended.wait, 30)

    asyncio.run(run())
    handler.handle(logging.makeLogRecord({"name": "later"}))
    assert len(texts) == 2
    assert all("stopped, by Ctrl-C or its time-out" in text for text in texts), texts
    assert shown == ["cotune.x", "later"]
