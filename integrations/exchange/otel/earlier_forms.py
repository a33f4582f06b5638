"""Messages in two earlier forms: OpenLLMetry's numbered attributes, and one span event per message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cotune.integrations.exchange.otel.messages import (
    as_text,
    decoded,
    json_value,
    mapping,
    numbered,
    tool_call,
    with_reason,
)
from cotune.integrations.exchange.otel.spans import SpanEvent

Messages = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Those of a request and of its answer, in OpenAI form. Both are empty if a message of the request is not whole."""

_PROMPT, _COMPLETION = "gen_ai.prompt", "gen_ai.completion"
_FUNCTIONS = "llm.request.functions"
_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_CHOICE = "gen_ai.choice"


def openllmetry_messages(attributes: Mapping[str, Any], left_out: Counter[str]) -> Messages:
    """From `gen_ai.prompt.N.*` and `gen_ai.completion.N.*`."""
    request = []
    for fields in numbered(attributes, _PROMPT):
        message = _message(str(fields.get("role") or "user"), _with_tool_calls(fields), _PROMPT, left_out)
        if message is None:
            return [], []
        request.append(message)
    answers = []
    for fields in numbered(attributes, _COMPLETION):
        answer = _message("assistant", _with_tool_calls(fields), _COMPLETION, left_out)
        if answer is not None:
            answers.append(with_reason(answer, fields))
    return request, answers


def openllmetry_tools(attributes: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """The functions of a request, each with its parameters as an object."""
    tools = []
    for fields in numbered(attributes, _FUNCTIONS):
        parameters = json_value(fields.get("parameters"), _FUNCTIONS, left_out)
        tools.append({**fields, "parameters": parameters} if parameters is not None else fields)
    return tools


def event_messages(events: Sequence[SpanEvent], left_out: Counter[str]) -> Messages:
    """From the events `gen_ai.user.message`, `gen_ai.choice` and the like.

    The fields are in the event's attributes, or as JSON in `gen_ai.event.content`. Events without content, which SDKs
    write unless they are told to capture it, are no whole messages.
    """
    request: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for event in events:
        if event.name not in _EVENTS and event.name != _CHOICE:
            continue
        body = json_value(event.attributes.get("gen_ai.event.content"), "gen_ai.event.content", left_out)
        fields = body if isinstance(body, Mapping) else event.attributes
        if event.name == _CHOICE:
            said = decoded(fields.get("message"))
            answer = _message("assistant", said if isinstance(said, Mapping) else {"content": said}, _CHOICE, left_out)
            if answer is not None:
                answers.append(with_reason(answer, fields))
            continue
        message = _message(str(fields.get("role") or _EVENTS[event.name]), fields, event.name, left_out)
        if message is None:
            return [], []
        request.append(message)
    return request, answers


def _with_tool_calls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message, with the calls that are in numbered ones."""
    calls = [
        tool_call(call.get("id"), call.get("name"), call.get("arguments")) for call in numbered(fields, "tool_calls")
    ]
    return {**fields, "tool_calls": calls}


def _message(role: str, fields: Mapping[str, Any], name: str, left_out: Counter[str]) -> dict[str, Any] | None:
    """A message in OpenAI form; None if it has neither content nor tool calls, or its content was cut."""
    content = fields.get("content")
    if isinstance(content, str) and content.startswith("[{"):  # parts as JSON, or a text that begins alike
        parts = decoded(content)
        if parts is content and content.startswith('[{"type"'):
            left_out[f"cut:{name}"] += 1
            return None
        content = parts
    if isinstance(content, list):
        content = _content(content)
    elif content is not None:
        content = as_text(content)
    given = decoded(fields.get("tool_calls"))
    calls = [_tool_call(call) for call in given if isinstance(call, Mapping)] if isinstance(given, list) else []
    if content is None and not calls:
        return None
    message: dict[str, Any] = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and (id := fields.get("tool_call_id") or fields.get("id")):
        message["tool_call_id"] = id
    return message


def _content(parts: list[Any]) -> Any:
    """Parts in OpenAI form as they are, blocks of text as one text, and any other list as the JSON it is."""
    if all(isinstance(part, Mapping) and part.get("type") in ("text", "image_url") for part in parts):
        return parts
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return as_text(parts)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = mapping(call.get("function")) or call
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"))
