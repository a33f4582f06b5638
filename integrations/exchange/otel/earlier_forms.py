"""Reads messages in two earlier forms: OpenLLMetry's numbered attributes, and one span event per message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cotune.integrations.exchange.otel.messages import (
    as_mapping,
    as_text,
    decode_json,
    fields_by_number,
    json_value,
    tool_call,
    with_reason,
)
from cotune.integrations.exchange.otel.spans import SpanEvent

Messages = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Messages of a request and of its answer, in OpenAI form. Both are empty if a message of the request is incomplete."""

_PROMPT, _COMPLETION = "gen_ai.prompt", "gen_ai.completion"
_FUNCTIONS = "llm.request.functions"
_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_CHOICE = "gen_ai.choice"


def openllmetry_messages(attributes: Mapping[str, Any], left_out: Counter[str]) -> Messages:
    """Messages of the request and of the answer, from the attributes `gen_ai.prompt.N.*` and `gen_ai.completion.N.*`.

    Both are empty if a message of the request is incomplete. Incomplete answers are left out.
    """
    request = []
    for fields in fields_by_number(attributes, _PROMPT):
        message = _message(str(fields.get("role") or "user"), _with_tool_calls(fields), _PROMPT, left_out)
        if message is None:
            # The model would not have given this answer to the other messages alone.
            return [], []
        request.append(message)
    answers = []
    for fields in fields_by_number(attributes, _COMPLETION):
        answer = _message("assistant", _with_tool_calls(fields), _COMPLETION, left_out)
        if answer is not None:
            answers.append(with_reason(answer, fields))
    return request, answers


def openllmetry_tools(attributes: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """The functions of a request, each with its parameters as an object."""
    tools = []
    for fields in fields_by_number(attributes, _FUNCTIONS):
        parameters = json_value(fields.get("parameters"), _FUNCTIONS, left_out)
        tools.append({**fields, "parameters": parameters} if parameters is not None else fields)
    return tools


def event_messages(events: Sequence[SpanEvent], left_out: Counter[str]) -> Messages:
    """Messages from the events `gen_ai.user.message`, `gen_ai.choice` and similar ones.

    The fields are in the event's attributes, or as JSON in `gen_ai.event.content`. SDKs write events without content
    unless their capture is turned on; these count as incomplete messages.
    """
    request: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for event in events:
        if event.name not in _EVENTS and event.name != _CHOICE:
            continue
        body = json_value(event.attributes.get("gen_ai.event.content"), "gen_ai.event.content", left_out)
        fields = body if isinstance(body, Mapping) else event.attributes
        if event.name == _CHOICE:
            message_fields = decode_json(fields.get("message"))
            if not isinstance(message_fields, Mapping):
                message_fields = {"content": message_fields}
            answer = _message("assistant", message_fields, _CHOICE, left_out)
            if answer is not None:
                answers.append(with_reason(answer, fields))
            continue
        message = _message(str(fields.get("role") or _EVENTS[event.name]), fields, event.name, left_out)
        if message is None:
            return [], []
        request.append(message)
    return request, answers


def _with_tool_calls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message, with its tool calls from numbered fields."""
    calls = [
        tool_call(call.get("id"), call.get("name"), call.get("arguments"))
        for call in fields_by_number(fields, "tool_calls")
    ]
    return {**fields, "tool_calls": calls}


def _message(role: str, fields: Mapping[str, Any], name: str, left_out: Counter[str]) -> dict[str, Any] | None:
    """A message in OpenAI form; None if it has neither content nor tool calls, or its content was cut."""
    content = fields.get("content")
    # The content may be parts as JSON, or a text that begins like JSON.
    if isinstance(content, str) and content.startswith("[{"):
        parts_or_text = decode_json(content)
        is_no_json = parts_or_text is content
        if is_no_json and content.startswith('[{"type"'):
            # Parts whose JSON was cut off, as SDKs do with long attributes.
            left_out[f"cut:{name}"] += 1
            return None
        content = parts_or_text
    if isinstance(content, list):
        content = _content(content)
    elif content is not None:
        content = as_text(content)
    listed_calls = decode_json(fields.get("tool_calls"))
    if not isinstance(listed_calls, list):
        listed_calls = []
    calls = []
    for call in listed_calls:
        if isinstance(call, Mapping):
            function = as_mapping(call.get("function")) or call
            calls.append(tool_call(call.get("id"), function.get("name"), function.get("arguments")))
    if content is None and not calls:
        return None
    message: dict[str, Any] = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and (id := fields.get("tool_call_id") or fields.get("id")):
        message["tool_call_id"] = id
    return message


def _content(parts: list[Any]) -> Any:
    """The content of a message: parts in OpenAI form unchanged, blocks of text as one text, any other list as JSON."""
    if all(isinstance(part, Mapping) and part.get("type") in ("text", "image_url") for part in parts):
        return parts
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return as_text(parts)
