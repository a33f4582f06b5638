"""Prepares chat messages for a page: text, reasoning, tool calls with arguments, tool results, images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from cotune.recording.redaction import FAILED, WITHHELD

_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+\Z")
_LONGEST_ADDRESS = 500
"""The most characters of an image's address that are shown."""
_KNOWN = {"role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content", "reasoning", "refusal"}


class Part(msgspec.Struct, frozen=True):
    """One block of a message. `kind` is text, reasoning, tool_call, image or data; `label` stands above it."""

    kind: str
    text: str
    label: str = ""


class ShownMessage(msgspec.Struct, frozen=True):
    """A message: its speaker, the tool call that it answers, and its parts."""

    speaker: str
    parts: tuple[Part, ...]
    note: str = ""

    @property
    def redacted(self) -> bool:
        """Whether a redactor has replaced its text by a mark."""
        return any(part.text in (FAILED, WITHHELD) for part in self.parts)


def shown(body: Any) -> ShownMessage:
    """Prepare a message in OpenAI form. Unknown fields are shown as JSON."""
    if not isinstance(body, Mapping):
        return ShownMessage("message", tuple(_content(body)))
    parts = [*_reasoning(body), *_content(body.get("content")), *_tool_calls(body.get("tool_calls"))]
    if isinstance(body.get("refusal"), str):
        parts.append(Part("text", body["refusal"], "refusal"))
    other_fields = {}
    for key, value in body.items():
        if key not in _KNOWN and value not in (None, [], {}, ""):
            other_fields[key] = value
    if other_fields:
        parts.append(Part("data", pretty(other_fields)))
    note = " ".join(str(body[key]) for key in ("name", "tool_call_id") if body.get(key))
    return ShownMessage(str(body.get("role", "message")), tuple(parts), note)


def pretty(value: Any) -> str:
    """A value as JSON with indentation. A text that holds JSON is indented as well."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return json.dumps(value, ensure_ascii=False, indent=2, default=repr)


def first_line(value: Any, size: int = 160) -> str:
    """The beginning of a message or JSON value on one line."""
    if isinstance(value, Mapping):
        value = value.get("content") or value
    line = " ".join((value if isinstance(value, str) else pretty(value)).split())
    return line if len(line) <= size else f"{line[: size - 1]}…"


def _reasoning(body: Mapping[str, Any]) -> Iterable[Part]:
    for name in ("reasoning_content", "reasoning"):
        if isinstance(body.get(name), str) and body[name]:
            yield Part("reasoning", body[name], "reasoning")
            return


def _content(content: Any) -> Iterable[Part]:
    """The parts of a message's content, as a page shows them."""
    if content is None or content == "":
        return
    if isinstance(content, str):
        yield Part("text", content)
    elif isinstance(content, list):
        for item in content:
            yield _item(item)
    else:
        yield Part("data", pretty(content))


def _item(item: Any) -> Part:
    """One part of a content: a text, an image, or other data.

    An image is shown if the record contains it. Otherwise its address is shown, as a page loads nothing from elsewhere.
    """
    if isinstance(item, str):
        return Part("text", item)
    if not isinstance(item, Mapping):
        return Part("data", pretty(item))
    if isinstance(item.get("text"), str):
        return Part("text", item["text"])
    image = item.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str):
        return Part("data", pretty(item))
    if _IMAGE.match(url):
        return Part("image", url, "image")
    return Part("text", url[:_LONGEST_ADDRESS], "image by its address")


def _tool_calls(calls: Any) -> Iterable[Part]:
    """The tool calls of a message as parts. A malformed call is shown as data."""
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            label = f"calls {function.get('name', 'a tool')} {call.get('id') or ''}".strip()
            yield Part("tool_call", pretty(function.get("arguments", "")), label)
        else:
            yield Part("data", pretty(call), "tool call")
