"""Server-sent events of chat completions: a completion as a stream, and a stream as a completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def to_stream(completion: Mapping[str, Any], *, usage: bool) -> bytes:
    """The events of a `chat.completion` object; `usage` adds the chunk that `stream_options.include_usage` asks for."""
    base = {
        "id": completion["id"],
        "object": "chat.completion.chunk",
        "created": completion["created"],
        "model": completion["model"],
    }
    made = [{**base, "choices": [part]} for choice in completion["choices"] for part in _parts(choice)]
    if "prompt_token_ids" in completion:
        made[0]["prompt_token_ids"] = completion["prompt_token_ids"]
    if usage:
        made.append({**base, "choices": [], "usage": completion.get("usage")})
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in made) + DONE


def _parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    index, message = choice["index"], choice["message"]
    first = {"role": "assistant", "content": "" if message.get("content") is not None else None}
    yield {"index": index, "delta": first, "finish_reason": None}
    said = {k: v for k, v in message.items() if k not in ("role", "tool_calls") and v is not None}
    extra = {k: choice[k] for k in ("logprobs", "token_ids") if choice.get(k) is not None}
    if said or extra:
        yield {"index": index, "delta": said, "finish_reason": None, **extra}
    for position, tool in enumerate(message.get("tool_calls") or []):
        yield {"index": index, "delta": {"tool_calls": [{"index": position, **tool}]}, "finish_reason": None}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}


def from_stream(raw: bytes) -> dict[str, Any] | None:
    """The completion that a stream of events adds up to; None when it was not read to its end.

    Raises ValueError for events that are not JSON, and for an error event.
    """
    completion: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    done = False
    for data in events(raw):
        if data == b"[DONE]":
            done = True
            break
        _take(_decode(data), completion, choices)
    finished = bool(choices) and all(choice["finish_reason"] for choice in choices.values())
    if not (done or finished):
        return None
    completion["choices"] = [choices[index] for index in sorted(choices)]
    return completion


def part_of_stream(raw: bytes) -> dict[str, Any] | None:
    """The completion as far as the whole events of a broken or half-read stream tell it; None where they tell nothing.

    A choice without its end has the finish reason `interrupted`.
    """
    completion: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for data in events(raw[: raw.rfind(b"\n") + 1]):
        try:
            _take(_decode(data), completion, choices)
        except (ValueError, TypeError, AttributeError, KeyError):
            break
    if not any(len(choice["message"]) > 2 or choice["message"]["content"] for choice in choices.values()):
        return None
    completion["choices"] = [
        {**choices[index], "finish_reason": choices[index]["finish_reason"] or "interrupted"}
        for index in sorted(choices)
    ]
    return completion


def events(raw: bytes) -> Iterator[bytes]:
    """The data of each event of a stream that has one line of it."""
    for line in raw.replace(b"\r\n", b"\n").split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _take(event: Mapping[str, Any], completion: dict[str, Any], choices: dict[int, dict[str, Any]]) -> None:
    for key in ("id", "model", "created", "usage", "prompt_token_ids"):
        if event.get(key) is not None:
            completion[key] = event[key]
    for part in event.get("choices") or []:
        index = part.get("index") or 0
        _add(choices.setdefault(index, _empty(index)), part)


def _decode(data: bytes) -> dict[str, Any]:
    event = msgspec.json.decode(data)
    if not isinstance(event, dict):
        raise ValueError(f"event {event!r} is no object")
    if event.get("error"):
        raise ValueError(f"error event: {event['error']}")
    return event


def _empty(index: int) -> dict[str, Any]:
    return {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None}


def _add(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    delta, message = part.get("delta") or {}, choice["message"]
    for key, value in delta.items():
        if key == "tool_calls":
            for tool in value or []:
                _add_tool(message.setdefault("tool_calls", []), tool)
        elif value is not None and key != "role":
            message[key] = _joined(message.get(key), value)
    if part.get("token_ids"):
        choice.setdefault("token_ids", []).extend(part["token_ids"])
    if part.get("logprobs"):
        content = choice.setdefault("logprobs", {"content": []})["content"]
        content.extend(part["logprobs"].get("content") or [])
    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]


def _joined(so_far: Any, more: Any) -> Any:
    """What a field has grown to: texts and lists are appended, objects field by field; any other value replaces."""
    if isinstance(so_far, str) and isinstance(more, str):
        return so_far + more
    if isinstance(so_far, list) and isinstance(more, list):
        return so_far + more
    if isinstance(so_far, dict) and isinstance(more, dict):
        return so_far | {key: _joined(so_far.get(key), value) for key, value in more.items() if value is not None}
    return more


def _add_tool(tools: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    position = part.get("index")
    if position is None:  # some providers number no calls: an id begins one
        position = len(tools) if part.get("id") or not tools else len(tools) - 1
    while len(tools) <= position:
        tools.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    tool, function = tools[position], part.get("function") or {}
    tool["id"] = part.get("id") or tool["id"]
    tool["function"]["name"] += function.get("name") or ""
    tool["function"]["arguments"] += function.get("arguments") or ""
