"""Answers in Anthropic's Messages form: an answer as a Message and as its events, and a provider's as an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cotune.integrations.anthropic.requests import (
    arguments_in,
    assistant_of,
    chat_of,
    keep_arguments,
    unsupported_reason,
)
from cotune.integrations.openai.forms import Form
from cotune.integrations.openai.response_body import ProviderFailed
from cotune.integrations.openai.sse import events, grow, number
from cotune.recording.answers import Answer
from cotune.recording.recorder import LiveCall
from cotune.recording.records import Candidate, Usage

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_FINISHES = {**{reason: finish for finish, reason in _REASONS.items()}, "interrupted": "interrupted"}
_GROWING = {"text_delta": "text", "thinking_delta": "thinking"}


def message_of(call: LiveCall, answer: Answer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The Message for an answer: its reasoning, its text, its tool calls."""
    candidate = answer.candidates[answer.chosen]
    used = {"input_tokens": answer.usage.prompt_tokens, "output_tokens": len(candidate.token_ids)}
    if not candidate.token_ids:
        used["output_tokens"] = answer.usage.completion_tokens
    return {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": list(_blocks(call, candidate.message)),
        "stop_reason": _REASONS.get(candidate.finish_reason, "end_turn"),
        "stop_sequence": None,
        "usage": used,
    }


def _blocks(call: LiveCall, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    if message.get("content") or not message.get("tool_calls"):
        yield {"type": "text", "text": message.get("content") or ""}
    for position, tool in enumerate(message.get("tool_calls") or ()):
        function = tool.get("function") or {}
        arguments = function.get("arguments") or "{}"
        name = tool.get("id") or f"toolu_{call.id}_{position}"
        keep_arguments(call.episode, name, arguments)
        yield {"type": "tool_use", "id": name, "name": function.get("name"), "input": msgspec.json.decode(arguments)}


def to_events(message: Mapping[str, Any], asked: Mapping[str, Any]) -> bytes:
    """The events that a provider sends for a Message, in its order."""
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
    made: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        made += ({**event, "index": index} for event in _block_events(block))
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    made.append(
        {"type": "message_delta", "delta": ended, "usage": {"output_tokens": message["usage"]["output_tokens"]}}
    )
    made.append({"type": "message_stop"})
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in made)


def _block_events(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "tool_use":
        empty: dict[str, Any] = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
    else:
        empty, delta = {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
    yield {"type": "content_block_start", "content_block": {**block, **empty}}
    yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}


def answer_of(message: Any) -> Answer:
    """The answer in a Message. Raises ValueError when it has no content, ProviderFailed for an error."""
    if isinstance(message, Mapping) and message.get("type") == "error":
        raise ProviderFailed(f"error: {message.get('error')}")
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        raise ValueError("no content")
    read = assistant_of(message["content"])
    used = message.get("usage") or {}
    cached = (used.get("cache_creation_input_tokens") or 0) + (used.get("cache_read_input_tokens") or 0)
    candidate = Candidate(
        index=0,
        text=read["content"] or "",
        message=read,
        finish_reason=_FINISHES.get(message.get("stop_reason"), "stop"),  # type: ignore[arg-type]
    )
    usage = Usage((used.get("input_tokens") or 0) + cached, used.get("output_tokens") or 0)
    return Answer(candidates=(candidate,), usage=usage)


def from_events(raw: bytes) -> dict[str, Any] | None:
    """The Message that a stream adds up to; None when it was not read to its end.

    Raises ValueError for an event that is not JSON, ProviderFailed for an error event.
    """
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for data in events(raw):
        event = msgspec.json.decode(data)
        if event.get("type") == "error":
            raise ProviderFailed(f"error event: {event.get('error')}")
        if event.get("type") == "message_stop":
            return _whole(message, blocks)
        _take(event, message, blocks)
    return None


def part_of_events(raw: bytes) -> dict[str, Any] | None:
    """The Message as far as the sound events of a broken or half-read stream tell it; None where they tell nothing."""
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for data in events(raw[: raw.rfind(b"\n") + 1]):
        try:
            _take(msgspec.json.decode(data), message, blocks)
        except (ValueError, TypeError, AttributeError, KeyError):
            continue
    if not any(block.get(field) for block in blocks.values() for field in ("text", "thinking", "partial", "name")):
        return None
    return {**_whole(message, blocks), "stop_reason": message.get("stop_reason") or "interrupted"}


def _take(event: Mapping[str, Any], message: dict[str, Any], blocks: dict[int, dict[str, Any]]) -> None:
    kind = event.get("type")
    if kind == "message_start":
        message.update(event["message"])
    elif kind == "content_block_start":
        blocks[number(event, "index")] = dict(event["content_block"])
    elif kind == "content_block_delta":
        block, delta = blocks[event["index"]], event["delta"]
        if delta.get("type") == "input_json_delta":
            grow(block, "partial", delta["partial_json"])
        elif field := _GROWING.get(delta.get("type")):
            grow(block, field, delta[field])
    elif kind == "message_delta":
        message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
        message.update(event.get("delta") or {})


def _whole(message: dict[str, Any], blocks: dict[int, dict[str, Any]]) -> dict[str, Any]:
    content = []
    for index in sorted(blocks):
        block = dict(blocks[index])
        partial = block.pop("partial", None)
        content.append({**block, "input": partial} if partial else block)
    return {**message, "content": content}


def _keep(call: LiveCall, asked: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Remember the arguments of tool calls as they were written: requests send them back as objects."""
    for tool in assistant_of(message.get("content") or ()).get("tool_calls", ()):
        if arguments_in(call.episode).get(str(tool["id"])) is None:
            keep_arguments(call.episode, str(tool["id"]), tool["function"]["arguments"])


MESSAGES = Form(
    name="messages",
    path="/messages",
    chat=chat_of,
    unsupported_reason=unsupported_reason,
    body=message_of,
    events=to_events,
    answer=answer_of,
    stream=from_events,
    part=part_of_events,
    keep=_keep,
)
"""The interface at /v1/messages."""
