"""Anthropic's Messages API through the gateway, with its own SDK as the client: recorded, and answered by policies."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import cotune
from tests.integrations.provider import Provider
from tests.integrations.recorded import Recorded, answer, asks, tool_call
from tests.integrations.web.gateway.client import Bench, bench

if TYPE_CHECKING:
    import anthropic

LOOK = {
    "name": "look",
    "description": "looks",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
USAGE = {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 2}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "stop_sequence": None,
    "usage": USAGE,
}
SPOKEN = {
    **MESSAGE,
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "hello"},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}},
    ],
    "stop_reason": "tool_use",
}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def stream() -> list[bytes]:
    """SPOKEN as a provider streams it, arguments with a space in them."""
    made = [event("message_start", message={**MESSAGE, "content": [], "stop_reason": None}), event("ping")]
    deltas = [
        [{"type": "thinking_delta", "thinking": "hm"}, {"type": "signature_delta", "signature": "s"}],
        [{"type": "text_delta", "text": "hel"}, {"type": "text_delta", "text": "lo"}],
        [
            {"type": "input_json_delta", "partial_json": '{"at"'},
            {"type": "input_json_delta", "partial_json": ': "sky"}'},
        ],
    ]
    empty = [{"thinking": "", "signature": ""}, {"text": ""}, {"input": {}}]
    for index, (block, grown, start) in enumerate(zip(SPOKEN["content"], deltas, empty, strict=True)):
        made.append(event("content_block_start", index=index, content_block={**block, **start}))
        made += [event("content_block_delta", index=index, delta=delta) for delta in grown]
        made.append(event("content_block_stop", index=index))
    made.append(event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 9}))
    return [*made, event("message_stop")]


def reply(body: dict[str, Any], number: int) -> tuple[int, str, list[Any]]:
    if body.get("stream"):
        return 200, "text/event-stream", stream()
    return 200, "application/json", [json.dumps(SPOKEN).encode()]


def client(base: str, **options: Any) -> anthropic.Anthropic:
    import anthropic  # seconds of a processor: not in every process that collects tests

    return anthropic.Anthropic(base_url=base, **{"api_key": "their-key", "max_retries": 0, **options})


def converse(base: str, streamed: bool) -> tuple[anthropic.types.Message, anthropic.types.Message]:
    """Two turns with a tool, as an application takes them."""
    sdk, messages = client(base), [{"role": "user", "content": "what colour?"}]
    asked: dict[str, Any] = {
        "model": "claude",
        "max_tokens": 50,
        "system": "Be brief.",
        "tools": [LOOK],
        "stop_sequences": ["."],
    }

    def ask() -> anthropic.types.Message:
        if not streamed:
            return sdk.messages.create(messages=messages, **asked)
        with sdk.messages.stream(messages=messages, **asked) as events:
            return events.get_final_message()

    first = ask()
    (use,) = (block for block in first.content if block.type == "tool_use")
    messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "blue"}]}
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "so?"}]})
    return first, ask()


@pytest.fixture
def gate(tmp_path: Path) -> Any:
    with bench(tmp_path) as made:
        made.provider.reply = reply
        yield made


@pytest.mark.parametrize("streamed", [False, True])
def test_a_provider_is_recorded_as_chat(gate: Bench, streamed: bool) -> None:
    episode = gate.open()["id"]
    first, _ = converse(f"{gate.url}/e/{episode}/r/painter", streamed)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    gate.end(episode)
    calls = gate.calls(episode)
    assert [(c.role, c.status, c.streamed, c.params["api"]) for c in calls] == [
        ("painter", "ok", streamed, "messages")
    ] * 2
    message = calls[0].candidates[0].message
    arguments = '{"at": "sky"}' if streamed else '{"at":"sky"}'
    assert (message["content"], message["reasoning_content"]) == ("hello", "hm")
    assert message["tool_calls"] == [
        {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    ]
    assert calls[0].candidates[0].finish_reason == "tool_calls"
    assert (calls[0].usage.prompt_tokens, calls[0].usage.completion_tokens) == (7, 9 if streamed else 3)
    assert (calls[0].params["max_tokens"], calls[0].params["stop"]) == (50, ["."])
    said = [gate.store.message(name) for name in calls[1].messages]
    assert [m["role"] for m in said] == ["system", "user", "assistant", "tool", "user"]
    assert (said[2], said[3]["content"], said[4]["content"]) == (message, "blue", "so?")
    assert calls[1].parents == (calls[0].id,)
    assert gate.provider.headers[0]["authorization"] == "Bearer their-key"
    assert gate.provider.requests[0]["system"] == "Be brief."


@pytest.mark.parametrize("streamed", [False, True])
def test_policies_answer(nowhere: None, record: Recorded, streamed: bool) -> None:
    found: list[anthropic.types.Message] = []
    said = asks(tool_call("look", {"at": "sky"}, "call_7")) | {"reasoning_content": "hm", "content": "I look."}

    def app(task: Any) -> float:
        with cotune.gateway() as gate:
            found.extend(converse(gate.role_url("painter").removesuffix("/v1"), streamed))
        return 1.0

    record(app, lambda call: answer("no", said, chosen=1) if call.turn == 0 else "blue")
    first, last = found
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.content[1].text, first.content[2].input, first.stop_reason) == ("I look.", {"at": "sky"}, "tool_use")
    assert (last.content[0].text, last.stop_reason, last.usage.input_tokens) == ("blue", "end_turn", 3)
    one, two = record.calls
    assert (one.chosen, len(one.candidates), one.candidates[1].token_ids, one.policy is not None) == (
        1,
        2,
        (11, 2),
        True,
    )
    assert two.parents == (one.id,)


def test_what_a_request_asks_reaches_the_policy(nowhere: None, record: Recorded) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }

    def app(task: Any) -> float:
        with cotune.gateway() as gate:
            client(gate.url.removesuffix("/v1")).messages.create(
                model="claude",
                max_tokens=5,
                messages=[{"role": "user", "content": "x"}],
                tools=[LOOK],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                thinking={"type": "disabled"},
                extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}},
            )
        return 1.0

    record(app, lambda call: "{}")
    params = record.calls[0].params
    assert (params["tool_choice"], params["parallel_tool_calls"]) == ("required", False)
    assert params["response_format"]["json_schema"]["schema"] == schema
    assert (params["chat_template_kwargs"], params["reasoning_effort"]) == ({"enable_thinking": False}, "low")


def test_what_only_the_provider_does_is_refused(nowhere: None, record: Recorded) -> None:
    errors: list[str] = []

    def app(task: Any) -> float:
        with cotune.gateway() as gate:
            sdk = client(gate.url.removesuffix("/v1"))
            for more in (
                {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}
                    ]
                },
            ):
                asked = {"messages": [{"role": "user", "content": "x"}], "model": "claude", "max_tokens": 5, **more}
                sdk.messages.create(**asked)
        return 1.0

    def unsupported_reason(call: Any) -> Any:
        errors.append(call.unsupported_reason)
        return "ok"

    record(app, unsupported_reason)
    assert errors == ["tools that the provider runs (web_search_20250305)", "blocks of type document"]


def test_failures_retries_and_half_streams(gate: Bench) -> None:
    import anthropic

    gate.provider.reply = lambda body, number: (
        (529, "application/json", [b'{"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}'])
        if number == 0
        else (200, "text/event-stream", [*stream()[:6], Provider.CUT])
        if body.get("stream")
        else reply(body, number)
    )
    episode = gate.open()["id"]
    base, hello = (
        f"{gate.url}/e/{episode}",
        {"model": "claude", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    )
    client(base, max_retries=2).messages.create(**hello)
    with contextlib.suppress(anthropic.APIError, AssertionError), client(base).messages.stream(**hello) as events:
        events.get_final_message()
    refused = httpx.post(f"{base}/v1/messages", json={"model": "claude", "messages": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    gate.when_idle()
    gate.end(episode)
    busy, whole, broken = gate.calls(episode)
    assert [(call.status, call.error) for call in (busy, whole)] == [("error", "HTTP 529"), ("ok", None)]
    assert (broken.status, broken.candidates[0].message["reasoning_content"]) == ("malformed", "hm")


def test_providers_and_keys_of_their_own(tmp_path: Path) -> None:
    from anthropic import AuthenticationError

    from tests.integrations.provider import serving

    with serving() as other:
        other.reply = reply
        options = {"anthropic": other.url, "token": "secret", "key": "openai-key", "anthropic_key": "claude-key"}
        with bench(tmp_path, **options) as gate:
            hello = {"model": "claude", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
            client(gate.url, api_key="secret").messages.create(**hello)
            with pytest.raises(AuthenticationError):
                client(gate.url, api_key="wrong").messages.create(**hello)
            gate.client(f"{gate.url}/v1").with_options(api_key="secret").chat.completions.create(
                model="m", messages=hello["messages"]
            )
            plain = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}  # as the SDK sent it before 2.0
            httpx.post(f"{gate.url}/v1/messages", json=hello, headers=plain).raise_for_status()
            sent = [(got.get("authorization"), got.get("x-api-key")) for got in other.headers]
            assert sent == [("Bearer claude-key", None), (None, "claude-key")]
            assert "secret" not in json.dumps(other.headers + gate.provider.headers)
            assert [sent.get("authorization") for sent in gate.provider.headers] == ["Bearer openai-key"]
