"""Chat messages: OpenAI form on our side, roles and parts on that of OpenTelemetry's GenAI conventions."""

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
    """A message of a request or answer with its content as parts; fields that have no place there are counted.

    One that is in no chat form is one part of text, its JSON.
    """
    try:
        return _to_parts(message, left_out)
    except (AttributeError, TypeError, ValueError):
        left_out["malformed_message"] += 1
        return {"role": "user", "parts": [{"type": "text", "content": as_text(message)}]}


def _to_parts(message: Mapping[str, Any], left_out: Counter[str]) -> dict[str, Any]:
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
        arguments = _object(function.get("arguments"))
        parts.append({"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments})
    left_out.update(f"message.{name}" for name, value in message.items() if name not in _KNOWN and value is not None)
    made: dict[str, Any] = {"role": message.get("role") or "user", "parts": parts}
    if message.get("name"):
        made["name"] = message["name"]
    return made


def from_parts(message: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """The message in OpenAI form; several where it holds several tool results. Parts of other kinds are counted."""
    role = str(message.get("role") or "user")
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for part in _parts(message):
        kind = part.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": str(part.get("content", part.get("text", "")))})
        elif kind == "reasoning":
            reasoning.append(str(part.get("content") or ""))
        elif kind == "tool_call":
            calls.append(tool_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            answer = part.get("response", part.get("result"))
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": as_text(answer)})
        elif kind == "uri" and part.get("modality") == "image":
            texts.append({"type": "image_url", "image_url": {"url": part.get("uri")}})
        elif kind == "blob" and part.get("modality") == "image":
            url = f"data:{part.get('mime_type') or 'image/png'};base64,{part.get('content') or ''}"
            texts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            left_out[f"part.{kind}"] += 1
    if results and not texts and not calls:
        return results
    plain = len(texts) == 1 and texts[0]["type"] == "text"
    made: dict[str, Any] = {"role": role, "content": texts[0]["text"] if plain else texts or None}
    if reasoning:
        made["reasoning_content"] = "\n".join(reasoning)
    if calls:
        made["tool_calls"] = calls
    if message.get("name"):
        made["name"] = message["name"]
    return [made, *results]


def tool_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call in OpenAI form; arguments as text, whatever they came as."""
    text = "{}" if arguments is None else as_text(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def tool_definition(tool: Any) -> Any:
    """A tool of a request in the form of the conventions: a function's fields are next to its type."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return {"type": "function", **function} if isinstance(function, Mapping) else tool


def as_text(value: Any) -> str:
    """Text as it is, anything else as compact JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def decoded(value: Any) -> Any:
    """The value of a JSON text; anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


_JSON_BEGINS = re.compile(r"""\s*(\[\s*([\[{"\]]|$)|\{\s*(["}]|$))""")


def json_value(value: Any, name: str, left_out: Counter[str]) -> Any:
    """As `decoded`, but None for JSON that was cut, which is counted under the `name` of its attribute.

    SDKs and backends cut long attributes, some after 1,024 characters. The beginning of a JSON text is no plain text.
    """
    found = decoded(value)
    if isinstance(found, str) and found is value and _JSON_BEGINS.match(found):
        left_out[f"cut:{name}"] += 1
        return None
    return found


def numbered(found: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Attributes `prefix.N.rest`, by N: each as a mapping of its rests."""
    items: dict[int, dict[str, Any]] = {}
    for key, value in found.items():
        if key.startswith(f"{prefix}."):
            number, _, rest = key[len(prefix) + 1 :].partition(".")
            if number.isdecimal():
                items.setdefault(int(number), {})[rest] = value
    return [items[number] for number in sorted(items)]


def with_reason(answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with the reason why it ended, if the fields say one."""
    reason = fields.get("finish_reason")
    return {**answer, "finish_reason": reason} if reason else answer


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping as it is, anything else as an empty one."""
    return value if isinstance(value, Mapping) else {}


def field(value: Mapping[str, Any], name: str) -> Any:
    """A field by its name in camel case, or in snake case."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return value.get(name) if value.get(name) is not None else value.get(snake)


def objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """The objects of a list in a field, in camel case or snake case."""
    found = field(mapping(value), name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _object(arguments: Any) -> Any:
    """Arguments as an object where that loses nothing, else as the text they are."""
    if not isinstance(arguments, str):
        return arguments
    value = decoded(arguments)
    return value if isinstance(value, dict) and as_text(value) == arguments else arguments


def _part(part: Any, left_out: Counter[str]) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        return {"type": "text", "content": str(part)}
    if part.get("type") == "text":
        return {"type": "text", "content": part.get("text")}
    if part.get("type") == "image_url":
        image = part.get("image_url") or {}
        if isinstance(image, Mapping):
            left_out.update(f"image_url.{name}" for name in image if name != "url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if (held := decoded_image(url)) is not None:
            content = base64.b64encode(held.data).decode()
            return {"type": "blob", "modality": "image", "mime_type": held.media_type, "content": content}
        return {"type": "uri", "modality": "image", "uri": url}
    return dict(part)


def _parts(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Parts of a message; a plain `content` counts as one part of text."""
    parts = message.get("parts")
    if parts is None:
        content = message.get("content")
        parts = [] if content is None else content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [part if isinstance(part, Mapping) else {"type": "text", "content": str(part)} for part in parts]
