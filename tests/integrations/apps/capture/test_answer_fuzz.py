"""Answers of providers with fields mistyped, missing and cut: the application sees what it would have seen, every
call is recorded, and every record can be read by all that reads records."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from autogen_core import FunctionCall
from autogen_core.models import CreateResult, RequestUsage
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from rich.console import Console

import cotune
from cotune.cli.printing.overview import show_run
from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow_of
from cotune.integrations.apps.autogen import messages as autogen_messages
from cotune.integrations.apps.crewai import messages as crewai_values
from cotune.integrations.apps.openai.completions import to_stream
from cotune.integrations.apps.openai.forms import FORMS, end_with_body
from cotune.integrations.apps.openai.response_body import to_events
from cotune.integrations.exchange.otel.exporter import export_file
from cotune.integrations.exchange.otel.spans import Detail
from cotune.reading.sft_export import write_supervised
from cotune.recording.model_calls import end_call, open_call
from cotune.records.structs import Task
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import completion
from tests.mutations import ODD, as_json, damaged, mutated

TOOL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
LOGPROBS = {"content": [{"token": "h", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
CHAT = completion({"role": "assistant", "content": "hello", "reasoning_content": "so", "tool_calls": [TOOL]})
CHAT["choices"][0] |= {"logprobs": LOGPROBS, "token_ids": [7]}
CHAT["prompt_token_ids"] = [1, 2, 3]
RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "m", "error": None,
    "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "tool_choice": "auto", "tools": [], "top_p": 1.0,
    "output": [
        {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "status": "completed"},
        {
            "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        },
        {"id": "fc_1", "type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
    ],
    "usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10, "input_tokens_details": {"cached_tokens": 0},
              "output_tokens_details": {"reasoning_tokens": 0}},
}  # fmt: skip
EVENTS = {
    "chat": to_stream(CHAT, {"stream_options": {"include_usage": True}}),
    "responses": to_events(RESPONSE, {}),
}
BODIES = {"chat": CHAT, "responses": RESPONSE}
COUNTS = [40, pytest.param(1_700, marks=pytest.mark.long)]


def answers(rng: random.Random, form: str, streamed: bool) -> bytes:
    """A body of this interface that a provider should not send."""
    if not streamed:
        raw = as_json(mutated(rng, BODIES[form]))
        return damaged(rng, raw) if rng.random() < 0.15 else raw
    blocks = EVENTS[form].split(b"\n\n")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(blocks))
        head, mark, data = blocks[at].rpartition(b"data: ")
        with contextlib.suppress(ValueError):  # "[DONE]", and what has been damaged already
            data = as_json(mutated(rng, json.loads(data)))
        blocks[at] = damaged(rng, blocks[at]) if rng.random() < 0.15 else head + mark + data
        if rng.random() < 0.1:
            blocks.insert(at, blocks[rng.randrange(len(blocks))])
    return b"\n\n".join(blocks)


def asked(client: openai.OpenAI, form: str, streamed: bool) -> Any:
    messages: Any = [{"role": "user", "content": "hi"}]
    if form == "chat":
        return client.chat.completions.create(model="m", messages=messages, stream=streamed)
    return client.responses.create(model="m", input="hi", stream=streamed)


def met(form: str, streamed: bool, raw: bytes) -> str:
    """What the application sees of an answer: what it reads, and what is raised."""
    kind = "text/event-stream" if streamed else "application/json"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers={"content-type": kind}, content=raw))
    seen: list[str] = []
    with openai.OpenAI(
        api_key="k", base_url="http://x/v1", max_retries=0, http_client=httpx.Client(transport=transport)
    ) as c:
        try:
            found = asked(c, form, streamed)
            seen.extend(map(repr, found) if streamed else [repr(found)])
        except Exception as error:  # noqa: BLE001
            seen.append(f"{type(error).__name__}: {error}"[:200])
    return "\n".join(seen)


class Readable:
    """A records file that every reader is tried on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = SqliteStore.open(folder / "records.db")
        self.warnings: Counter[str] = Counter()

    def run(self, work: Callable[[], None]) -> None:
        """One episode."""

        def fn(task: Any) -> float:
            work()
            return 1.0

        outcome = asyncio.run(run_episode(workflow_of(cotune.workflow(fn)), Task(id="t", input="q"), sink=self.store))
        assert outcome.error is None, outcome.error
        self.warnings.update(outcome.live.warnings)

    def check(self, episodes: int) -> Counter[str]:
        """Statuses of the calls, one in each episode, after everything has been read in every way."""
        self.store.close()
        assert self.store.health.lost == 0
        statuses: Counter[str] = Counter()
        with SqliteStore.open(self.folder, read_only=True) as store:
            for episode in store.episodes():
                (call,) = store.calls(episode.id)
                statuses[call.status] += 1
                assert call.status != "malformed" or call.error
                for name in call.messages:
                    store.message(name)
            exported = export_file(store, self.folder / "spans.jsonl", detail=Detail(content=True, tokens=True))
            write_supervised(store, self.folder / "sft.jsonl")
            assert store.health.unreadable == 0
            ids = [episode.id for episode in store.episodes()]
        assert exported.episodes == sum(statuses.values()) == episodes
        for ways in ({}, {"groups": True}, *({"episode": id} for id in ids[:: max(1, len(ids) // 20)])):
            Console(file=io.StringIO(), width=200).print(show_run(self.folder, **ways))
        assert not self.warnings.keys() & {"unrecorded", "lost", "unread_call", "late_call"}
        return statuses


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Readable]:
    made = Readable(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("form", ["chat", "responses"])
def test_through_the_sdk(records: Readable, form: str, streamed: bool, count: int) -> None:
    rng = random.Random(f"{form} {streamed}")
    for _ in range(count):
        raw = answers(rng, form, streamed)
        seen: list[str] = []
        records.run(lambda raw=raw, seen=seen: seen.append(met(form, streamed, raw)))
        assert seen == [met(form, streamed, raw)], raw
    assert records.check(count)["malformed"] > count / 16


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_as_bodies(records: Readable, count: int) -> None:
    """What the gateway does with a body, and the SDK's hook: many calls at little cost."""
    rng = random.Random(7)

    def one() -> None:
        form, streamed = rng.choice(FORMS), rng.random() < 0.5
        call = open_call(lambda: {"messages": [{"role": "user", "content": "x"}], "stream": streamed})
        assert call is not None
        if not end_with_body(call, form, {}, answers(rng, form.name, streamed), streamed):
            call.fail("malformed", "cut short")

    for _ in range(count):
        records.run(one)
    assert records.check(count)["malformed"] > count / 16


class Said(BaseChatModel):
    """A chat model that returns whatever it is given."""

    result: Any = None

    @property
    def _llm_type(self) -> str:
        return "said"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs) -> ChatResult:
        return self.result

    def _stream(self, messages, stop=None, run_manager=None, **kwargs) -> Iterator[ChatGenerationChunk]:
        yield from self.result


def langchain(rng: random.Random, streamed: bool) -> None:
    kind, wrapped = (AIMessageChunk, ChatGenerationChunk) if streamed else (AIMessage, ChatGeneration)
    fields = {
        "content": "hello",
        "usage_metadata": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10},
        "response_metadata": {"finish_reason": "stop"},
        "additional_kwargs": {},
        "tool_calls": [{"name": "add", "args": {"a": 1}, "id": "c", "type": "tool_call"}],
    }
    made = []
    for _ in range(2 if streamed else 1):
        message = kind(content="hello")
        for name, value in mutated(rng, fields).items():
            object.__setattr__(message, name, value) if name in fields else None
        made.append(
            wrapped.model_construct(message=message, text="hello", generation_info=rng.choice([None, {"a": 1}]))
        )
    model = Said(result=made if streamed else ChatResult.model_construct(generations=made))
    with contextlib.suppress(Exception):  # what LangChain itself makes of it is not the point here
        list(model.stream("hi")) if streamed else model.invoke("hi")


def autogen(rng: random.Random, streamed: bool) -> None:
    odd = lambda value: rng.choice(ODD) if rng.random() < 0.3 else value  # noqa: E731
    calls = [FunctionCall(id=odd("c"), name=odd("add"), arguments=odd("{}"))]
    result = CreateResult.model_construct(
        finish_reason=odd("stop"),
        content=odd("hello") if rng.random() < 0.5 else calls,
        usage=RequestUsage(odd(7), odd(3)),
        cached=False,
        thought=odd(None),
    )
    opened(lambda call: end_call(call, result, autogen_messages.answer_of_result))


def crewai(rng: random.Random, streamed: bool) -> None:
    value = rng.choice([rng.choice(ODD), mutated(rng, [TOOL, {"name": "f", "input": {"a": 1}}]), mutated(rng, TOOL)])
    opened(lambda call: end_call(call, value, crewai_values.answer_of))


def opened(end: Callable[[Any], None]) -> None:
    call = open_call(lambda: {"messages": [{"role": "user", "content": "x"}]})
    assert call is not None
    end(call)
    assert call.ended


@pytest.mark.parametrize("count", [60, pytest.param(3_400, marks=pytest.mark.long)])
@pytest.mark.parametrize("framework", [langchain, autogen, crewai], ids=lambda fn: fn.__name__)
def test_through_a_framework(records: Readable, framework: Callable[..., None], count: int) -> None:
    rng = random.Random(framework.__name__)
    for _ in range(count):
        records.run(lambda: framework(rng, rng.random() < 0.5))
    assert records.check(count)["malformed"] > count / 20
