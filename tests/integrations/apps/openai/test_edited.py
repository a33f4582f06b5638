"""Edited prompts at the OpenAI SDK: what goes out differs in the edited text alone, in every way to ask."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

import cotune
from tests.integrations.edits import NEW, OLD, part, prompts, with_edit
from tests.integrations.provider import Provider, completion, json_reply, said

ASKED = [{"role": "system", "content": OLD}, {"role": "user", "content": "hello ☃"}]
DESCRIBED = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": DESCRIBED}}]
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        }
    ],
}


class City(BaseModel):
    name: str = Field(description="The name of a city.")


@functools.cache
def client(url: str, retries: int = 0) -> openai.OpenAI:
    """Made once: a client takes longer to make than a call."""
    return openai.OpenAI(base_url=url, api_key="none", max_retries=retries)


def ask(url: str, **more: Any) -> Any:
    return client(url).chat.completions.create(model="m", messages=ASKED, **more)


def asked_async(url: str, stream: bool) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
            answer = await made.chat.completions.create(model="m", messages=ASKED, stream=stream)
            if stream:
                assert [chunk async for chunk in answer]

    asyncio.run(run())


WAYS: dict[str, Callable[[str], Any]] = {
    "plain": ask,
    "streamed": lambda url: list(ask(url, stream=True)),
    "raw": lambda url: client(url).chat.completions.with_raw_response.create(model="m", messages=ASKED).parse(),
    "tools": lambda url: ask(url, tools=TOOLS, temperature=0.1, seed=2**60, logit_bias={"5": 1.0}),
    "async": lambda url: asked_async(url, stream=False),
    "async streamed": lambda url: asked_async(url, stream=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_the_edited_text_differs_on_the_wire(way: str, provider: Provider) -> None:
    WAYS[way](provider.url)
    with cotune.trace(prompts=prompts()) as traced:
        WAYS[way](provider.url)
    before, after = provider.raw
    assert after == with_edit(before)
    (call,) = traced.calls
    assert call.status == "ok"
    assert (call.messages, [m["content"] for m in call.sent]) == (ASKED, [NEW, "hello ☃"])
    assert call.record.prompts == prompts().id
    assert not traced.warnings
    headers = [{k: v for k, v in found.items() if k != "content-length"} for found in provider.headers]
    assert headers[0] == headers[1]


def test_a_parsed_answer_and_its_schema(provider: Provider) -> None:
    provider.reply = lambda body, n: json_reply(completion({"role": "assistant", "content": '{"name": "Bern"}'}))
    described = part("The name of a city.", "Its name, in English.", kind="format", key="City/name")
    for given in (None, prompts(part(OLD, NEW), described)):
        with cotune.trace(prompts=given):
            made = client(provider.url).chat.completions.parse(model="m", messages=ASKED, response_format=City)
        assert made.choices[0].message.parsed == City(name="Bern")
    edited = with_edit(provider.raw[0])
    assert provider.raw[1] == with_edit(edited, "The name of a city.", "Its name, in English.")


def test_each_retry_is_edited(provider: Provider) -> None:
    def reply(body: Any, number: int) -> Any:
        return json_reply({"error": {"message": "down"}}, 500) if number < 2 else said(body)

    provider.reply = reply
    with cotune.trace(prompts=prompts()) as traced:
        client(provider.url, retries=3).chat.completions.create(model="m", messages=ASKED)
    assert len(provider.raw) == 3
    assert len(set(provider.raw)) == 1
    assert provider.requests[0]["messages"][0]["content"] == NEW
    (call,) = traced.calls
    assert len(call.attempts) == 2
    assert call.sent[0]["content"] == NEW


def test_responses_by_instructions_items_tools_and_format(provider: Provider) -> None:
    provider.reply = lambda body, n: json_reply(RESPONSE)
    flat = {"type": "function", "name": "look", "description": "Looks.", "parameters": DESCRIBED, "strict": False}
    form = {"type": "json_schema", "name": "out", "schema": {"type": "object", "description": "What."}}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Mind the gap, all of you."}]},
        {"role": "user", "content": "hello"},
    ]
    edits = {
        OLD: part(OLD, NEW),
        "Mind the gap, all of you.": part("Mind the gap, all of you.", "Mind it."),
        "Looks.": part("Looks.", "Looks far.", kind="tool", key="look"),
        "A city.": part("A city.", "A town.", kind="tool", key="look/city"),
        "What.": part("What.", "Why.", kind="format", key="out/"),
    }
    options = {"input": items, "instructions": OLD, "tools": [flat], "text": {"format": form}}
    client(provider.url).responses.create(model="m", **options)
    with cotune.trace(prompts=prompts(*edits.values())) as traced:
        client(provider.url).responses.create(model="m", **options)
    expected = provider.raw[0]
    for old, edit in edits.items():
        expected = with_edit(expected, old, edit.now.texts[0])
    assert provider.raw[1] == expected
    (call,) = traced.calls
    assert [m["content"] for m in call.messages] == [OLD, "Mind the gap, all of you.", "hello"]
    assert [m["content"] for m in call.sent] == [NEW, "Mind it.", "hello"]
    assert (call.record.tools, call.record.sent_tools) != (None, None)
    assert call.record.sent_format
    assert "out" in str(call.params["response_format"])


def test_a_conversation_that_the_provider_keeps(provider: Provider) -> None:
    """The system text went out edited with the first request: it is said so of the second, which does not repeat it."""
    provider.reply = lambda body, n: json_reply({**RESPONSE, "id": f"resp_{n}"})
    with cotune.trace(prompts=prompts()) as traced:
        first = client(provider.url).responses.create(model="m", input=[*ASKED])
        client(provider.url).responses.create(model="m", input="more", previous_response_id=first.id)
    assert provider.requests[1]["input"] == "more"
    assert [m["content"] for m in traced.calls[1].sent] == [NEW, "hello ☃", "yes", "more"]
    assert not traced.warnings


def test_a_call_that_does_not_have_the_text_goes_out_as_it_is(provider: Provider, caplog: Any) -> None:
    other = [{"role": "system", "content": "You are terse. Never smile, secret."}, *ASKED[1:]]
    with cotune.trace(prompts=prompts()) as traced:
        client(provider.url).chat.completions.create(model="m", messages=other)
    assert provider.requests[0]["messages"] == other
    (call,) = traced.calls
    assert (call.record.unedited, call.sent == call.messages) == ("prompt_unmatched", True)
    assert traced.warnings == {"prompt_unmatched": 1}
    assert "secret" not in caplog.text


def test_another_role_with_the_same_text_is_left_alone(provider: Provider) -> None:
    with cotune.trace(prompts=prompts()) as traced, cotune.role("other"):
        ask(provider.url)
    assert provider.requests[0]["messages"] == ASKED
    assert (traced.calls[0].record.prompts, traced.warnings) == ("", {})


def test_the_application_sees_its_own_prompt(provider: Provider) -> None:
    mine = [{"role": "system", "content": OLD}, {"role": "user", "content": "hi"}]
    with cotune.trace(prompts=prompts()):
        client(provider.url).chat.completions.create(model="m", messages=mine)
    assert mine[0]["content"] == OLD
    assert provider.requests[0]["messages"][0]["content"] == NEW


def test_a_trace_inside_another(provider: Provider) -> None:
    with cotune.trace() as outer, cotune.trace(prompts=prompts()) as inner:
        ask(provider.url)
    assert outer.calls[0].sent[0]["content"] == inner.calls[0].sent[0]["content"] == NEW
    with cotune.trace(prompts=prompts()) as outer, cotune.trace() as inner:
        ask(provider.url)
    assert provider.raw[0] == provider.raw[1]
    assert inner.calls[0].record.prompts == outer.calls[0].record.prompts == prompts().id
    with cotune.trace(), cotune.trace(roles=lambda request: "named", prompts=prompts(part(OLD, NEW, "named"))) as inner:
        ask(provider.url)
    assert provider.raw[2] == provider.raw[0]
    assert (inner.calls[0].role, inner.calls[0].sent[0]["content"]) == ("named", NEW)
    with cotune.trace(prompts=prompts()), pytest.raises(cotune.errors.WorkflowError), cotune.trace(prompts=prompts()):
        pass
