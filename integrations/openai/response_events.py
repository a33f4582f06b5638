"""Server-sent events of the Responses API: a Response object as a stream, and a stream as a Response object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cotune.integrations.openai.response_body import ProviderFailed
from cotune.integrations.openai.sse import events, grow, number

_LAST = ("response.completed", "response.incomplete", "response.failed")


def to_events(response: Mapping[str, Any]) -> bytes:
    """The events that a provider sends for a response, in its order: item by item, part by part."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    last = f"response.{response['status']}"
    made: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(response["output"]):
        made += ((kind, {"output_index": index, **event}) for kind, event in _item(item))
    made.append((last, {"response": response}))
    return b"".join(_event(kind, number, event) for number, (kind, event) in enumerate(made))


def _event(kind: str, number: int, event: Mapping[str, Any]) -> bytes:
    body = msgspec.json.encode({"type": kind, "sequence_number": number, **event})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _item(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    field, empty = _GROWING[item["type"]]
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", field: empty}}
    yield from ((kind, {"item_id": item["id"], **event}) for kind, event in _CONTENT[item["type"]](item))
    yield "response.output_item.done", {"item": item}


def _text(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for at, part in enumerate(item["content"]):
        where, logprobs = {"content_index": at}, part.get("logprobs") or []
        yield "response.content_part.added", {**where, "part": {**part, "text": "", "logprobs": []}}
        yield "response.output_text.delta", {**where, "delta": part["text"], "logprobs": logprobs}
        yield "response.output_text.done", {**where, "text": part["text"], "logprobs": logprobs}
        yield "response.content_part.done", {**where, "part": part}


def _arguments(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
    yield "response.function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}


def _reasoning(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for at, part in enumerate(item["summary"]):
        where = {"summary_index": at}
        yield "response.reasoning_summary_part.added", {**where, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**where, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**where, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**where, "part": part}


_CONTENT = {"message": _text, "function_call": _arguments, "reasoning": _reasoning}
_GROWING: dict[str, tuple[str, Any]] = {
    "message": ("content", []),
    "function_call": ("arguments", ""),
    "reasoning": ("summary", []),
}
"""By type of an item: what its events fill in, and what that is before the first."""


def from_events(raw: bytes) -> dict[str, Any] | None:
    """The response that a stream of events ended with; None when it was not read to its end.

    Raises ValueError for an event that is not JSON, ProviderFailed for an error event.
    """
    for data in events(raw):
        event = msgspec.json.decode(data) if data != b"[DONE]" else {}
        if event.get("type") == "error" or event.get("error"):
            raise ProviderFailed(f"error event: {event.get('error') or event.get('message')}")
        if event.get("type") in _LAST:
            response: dict[str, Any] = event["response"]
            return response
    return None


def part_of_events(raw: bytes) -> dict[str, Any] | None:
    """The response as far as the sound events of a broken or half-read stream tell it; None where they tell nothing.

    Its status is `interrupted`.
    """
    items: dict[int, dict[str, Any]] = {}
    for data in events(raw[: raw.rfind(b"\n") + 1]):
        try:
            _take(msgspec.json.decode(data), items)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            continue
    output = [items[index] for index in sorted(items)]
    has_content = any(item.get("content") or item.get("arguments") or item.get("summary") for item in output)
    return {"status": "interrupted", "output": output} if has_content else None


def _take(event: Mapping[str, Any], items: dict[int, dict[str, Any]]) -> None:
    kind = event.get("type")
    if kind in ("response.output_item.added", "response.output_item.done"):
        items[number(event, "output_index")] = dict(event["item"])
    elif kind == "response.content_part.added":
        items[event["output_index"]].setdefault("content", []).append(dict(event["part"]))
    elif kind == "response.reasoning_summary_part.added":
        items[event["output_index"]].setdefault("summary", []).append(dict(event["part"]))
    elif kind == "response.output_text.delta":
        grow(items[event["output_index"]]["content"][event["content_index"]], "text", event["delta"])
    elif kind == "response.reasoning_summary_text.delta":
        grow(items[event["output_index"]]["summary"][event["summary_index"]], "text", event["delta"])
    elif kind == "response.function_call_arguments.delta":
        grow(items[event["output_index"]], "arguments", event["delta"])
