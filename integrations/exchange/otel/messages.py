"""Translates chat messages between OpenAI's form and the roles and parts of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cotune.records.images import decoded_image

_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}


def to_parts(message: Mapping[str, Any], left_out: Counter[str]) -> dict[str, Any]:
    """A message of a request or answer with its content as parts. Fields without a place in parts are counted.

    A malformed message becomes one text part with its JSON.
    """
    try:
        return _to_parts(message, left_out)
    except (AttributeError, TypeError, ValueError):
        left_out["malformed_message"] += 1
        return {"role": "user", "parts": [{"type": "text", "content": as_text(message)}]}


def _to_parts(message: Mapping[str, Any], left_out: Counter[str]) -> dict[str, Any]:
    """A chat message in OpenTelemetry's form, a list of parts. Fields without a counterpart are counted in
    `left_out`.
    """
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    content = message.get("content")
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif isinstance(content, str):
        parts.append({"type": "text", "content": content})
    elif content is not None:
        parts += [_part(part, left_out) for part in content]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = _arguments_object(function.get("arguments"))
        parts.append({"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments})
    left_out.update(f"message.{name}" for name, value in message.items() if name not in _KNOWN and value is not None)
    with_parts: dict[str, Any] = {"role": message.get("role") or "user", "parts": parts}
    if message.get("name"):
        with_parts["name"] = message["name"]
    return with_parts


def from_parts(message: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """A message with parts in OpenAI form, as one message, and one more for each tool result in its parts.

    Parts of unknown kinds are counted in `left_out`.
    """
    role = str(message.get("role") or "user")
    contents: list[dict[str, Any]] = []  # texts and images
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for part in _parts(message):
        kind = part.get("type")
        if kind == "text":
            contents.append({"type": "text", "text": str(part.get("content", part.get("text", "")))})
        elif kind == "reasoning":
            reasoning.append(str(part.get("content") or ""))
        elif kind == "tool_call":
            calls.append(tool_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            answer = part.get("response", part.get("result"))
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": as_text(answer)})
        elif kind == "uri" and part.get("modality") == "image":
            contents.append({"type": "image_url", "image_url": {"url": part.get("uri")}})
        elif kind == "blob" and part.get("modality") == "image":
            data_url = f"data:{part.get('mime_type') or 'image/png'};base64,{part.get('content') or ''}"
            contents.append({"type": "image_url", "image_url": {"url": data_url}})
        else:
            left_out[f"part.{kind}"] += 1
    if results and not contents and not calls:
        return results  # the message has nothing else
    content: Any = contents or None
    if len(contents) == 1 and contents[0]["type"] == "text":
        content = contents[0]["text"]
    openai_message: dict[str, Any] = {"role": role, "content": content}
    if reasoning:
        openai_message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        openai_message["tool_calls"] = calls
    if message.get("name"):
        openai_message["name"] = message["name"]
    return [openai_message, *results]


def tool_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call in OpenAI form, with arguments as text."""
    text = "{}" if arguments is None else as_text(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def tool_definition(tool: Any) -> Any:
    """A tool of a request in the form of the conventions: a function's fields are next to its type."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return {"type": "function", **function} if isinstance(function, Mapping) else tool


def as_text(value: Any) -> str:
    """A text unchanged; any other value as compact JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def decode_json(value: Any) -> Any:
    """The value of a JSON text; any other value unchanged."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


_JSON_BEGINS = re.compile(r"""\s*(\[\s*([\[{"\]]|$)|\{\s*(["}]|$))""")


def json_value(value: Any, name: str, left_out: Counter[str]) -> Any:
    """Like `decode_json`, but None for JSON that was cut off. It is counted under the `name` of its attribute.

    SDKs and backends cut off long attributes, some after 1,024 characters. A text that begins like JSON, but is not
    JSON, is taken for a cut-off one.
    """
    content = decode_json(value)
    # `decode_json` returns a text that is not JSON unchanged: `content is value` means that it decoded nothing.
    if isinstance(content, str) and content is value and _JSON_BEGINS.match(content):
        left_out[f"cut:{name}"] += 1
        return None
    return content


def fields_by_number(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The attributes `prefix.N.field`, as a mapping of fields for each N, in the order of N."""
    items: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if key.startswith(f"{prefix}."):
            number, _, field_name = key[len(prefix) + 1 :].partition(".")
            if number.isdecimal():
                items.setdefault(int(number), {})[field_name] = value
    return [items[number] for number in sorted(items)]


def with_reason(answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with the `finish_reason` of the fields, if they have one."""
    reason = fields.get("finish_reason")
    return {**answer, "finish_reason": reason} if reason else answer


def as_mapping(value: Any) -> Mapping[str, Any]:
    """A mapping unchanged; an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}


def field(value: Mapping[str, Any], name: str) -> Any:
    """A field by its name in camel case, or in snake case."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return value.get(name) if value.get(name) is not None else value.get(snake)


def list_of_objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """The objects of a list in a field, in camel case or snake case."""
    items = field(as_mapping(value), name)
    if not isinstance(items, list):
        return []
    return [item for item in items if isinstance(item, Mapping)]


def _arguments_object(arguments: Any) -> Any:
    """Arguments as an object if that loses nothing; otherwise unchanged, as a text."""
    if not isinstance(arguments, str):
        return arguments
    value = decode_json(arguments)
    return value if isinstance(value, dict) and as_text(value) == arguments else arguments


def _part(part: Any, left_out: Counter[str]) -> dict[str, Any]:
    """One part of a content in OpenTelemetry's form. An image in a data URL becomes a blob."""
    if not isinstance(part, Mapping):
        return {"type": "text", "content": str(part)}
    if part.get("type") == "text":
        return {"type": "text", "content": part.get("text")}
    if part.get("type") == "image_url":
        image = part.get("image_url") or {}
        if isinstance(image, Mapping):
            left_out.update(f"image_url.{name}" for name in image if name != "url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if (image_data := decoded_image(url)) is not None:
            content = base64.b64encode(image_data.data).decode()
            return {"type": "blob", "modality": "image", "mime_type": image_data.media_type, "content": content}
        return {"type": "uri", "modality": "image", "uri": url}
    return dict(part)


def _parts(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The parts of a message's content. A content that is a plain text counts as one text part."""
    parts = message.get("parts")
    if parts is None:
        content = message.get("content")
        if content is None:
            parts = []
        elif isinstance(content, list):
            parts = content
        else:
            parts = [{"type": "text", "text": content}]
    return [part if isinstance(part, Mapping) else {"type": "text", "content": str(part)} for part in parts]
