"""The contents of an LLM span: kind, agent, model, parameters, messages, tools.

Two conventions are read: OpenTelemetry's for GenAI (as attributes, as JSON text in them, and as the event
`gen_ai.client.inference.operation.details`), and OpenInference's `llm.*`. `earlier_forms` reads messages of
OpenLLMetry and those in one event each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.earlier_forms import event_messages, openllmetry_messages, openllmetry_tools
from cotune.integrations.exchange.otel.messages import (
    as_text,
    decoded,
    from_parts,
    json_value,
    mapping,
    numbered,
    tool_call,
    with_reason,
)
from cotune.integrations.exchange.otel.spans import Span
from cotune.records.answers import MOST

Kind = Literal["workflow", "agent", "chat", "tool", "other"]

_OPERATIONS: dict[str, Kind] = {
    names.WORKFLOW: "workflow",
    names.AGENT: "agent",
    names.TOOL: "tool",
    names.CHAT: "chat",
    "generate_content": "chat",
    "text_completion": "chat",
}
_OPENINFERENCE: dict[str, Kind] = {"LLM": "chat", "AGENT": "agent", "TOOL": "tool"}
_OPENLLMETRY: dict[str, Kind] = {"chat": "chat", "completion": "chat"}
_TRACELOOP: dict[str, Kind] = {"workflow": "workflow", "agent": "agent", "tool": "tool"}
_DETAILS = "gen_ai.client.inference.operation.details"


def kind_of(span: Span) -> Kind:
    """The kind of a span."""
    operation = span.attributes.get(names.OPERATION)
    if operation is not None:
        return _OPERATIONS.get(str(operation), "other")
    for key, kinds in (("llm.request.type", _OPENLLMETRY), ("traceloop.span.kind", _TRACELOOP)):
        kind = kinds.get(str(span.attributes.get(key)).lower())
        if kind is not None:
            return kind
    return _OPENINFERENCE.get(str(span.attributes.get(names.SPAN_KIND)).upper(), "other")


def agent_of(span: Span) -> str | None:
    """The agent that a span names: itself an agent's, or a node's of a graph."""
    keys = (names.ROLE, names.AGENT_NAME, "agent.name")
    named = next((span.attributes[key] for key in keys if span.attributes.get(key)), None)
    if not named and kind_of(span) == "agent":
        named = span.attributes.get("traceloop.entity.name") or span.name
    if not named:
        named = mapping(decoded(span.attributes.get("metadata"))).get("langgraph_node")
    return str(named) if named else None


def params_of(found: Mapping[str, Any], left_out: Counter[str]) -> dict[str, Any]:
    """Request parameters in OpenAI form."""
    given = json_value(found.get("llm.invocation_parameters"), "llm.invocation_parameters", left_out)
    params = {k: v for k, v in mapping(given).items() if k not in ("model", "messages", "tools")}
    params |= {name: found[key] for name, key in names.PARAMS.items() if found.get(key) is not None}
    if found.get(names.OUTPUT_TYPE) == "json":
        params.setdefault("response_format", {"type": "json_object"})
    return params


def whole(value: Any) -> int:
    """A count or number in a span; 0 where it is none."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return found if 0 <= found < MOST else 0


def messages_of(span: Span, left_out: Counter[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages of the request and of the answer, in OpenAI form; an answer's may carry a `finish_reason`.

    Without the whole prompt, the answer to it is left out as well.
    """
    for found in (span.attributes, *(event.attributes for event in span.events if event.name == _DETAILS)):
        if names.INPUT_MESSAGES in found or names.OUTPUT_MESSAGES in found:
            request = _request(found, left_out)
            return ([], []) if request is None else (request, _answer(found, left_out))
    request = [_openinference(one) for one in numbered(span.attributes, "llm.input_messages")]
    answers = [_openinference(one) for one in numbered(span.attributes, "llm.output_messages")]
    if not request and not answers:
        request, answers = openllmetry_messages(span.attributes, left_out)
    if not request and not answers:
        request, answers = event_messages(span.events, left_out)
    return request, answers


def tools_of(found: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]] | None:
    """Tool definitions in OpenAI form, None where there are none."""
    given = json_value(found.get(names.TOOL_DEFINITIONS), names.TOOL_DEFINITIONS, left_out)
    if not isinstance(given, list):
        given = [one.get("tool.json_schema") for one in numbered(found, "llm.tools")]
        given = given or openllmetry_tools(found, left_out)
    known = [one for one in (mapping(json_value(tool, "llm.tools", left_out)) for tool in given) if one]
    tools = []
    for one in known:
        bare = "function" not in one and one.get("type", "function") == "function"
        function = {k: v for k, v in one.items() if k != "type" and v is not None}
        tools.append({"type": "function", "function": function} if bare else dict(one))
    return tools or None


def _request(found: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]] | None:
    """The messages of a request; None if one of its attributes was cut."""
    system = json_value(found.get(names.SYSTEM_INSTRUCTIONS), names.SYSTEM_INSTRUCTIONS, left_out)
    given = json_value(found.get(names.INPUT_MESSAGES), names.INPUT_MESSAGES, left_out)
    for name, value in ((names.SYSTEM_INSTRUCTIONS, system), (names.INPUT_MESSAGES, given)):
        if value is None and found.get(name) is not None:
            return None
    messages = from_parts({"role": "system", "parts": _as_list(system)}, left_out) if system else []
    for message in _readable(given, left_out):
        messages += from_parts(message, left_out)
    return messages


def _answer(found: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    messages = []
    given = json_value(found.get(names.OUTPUT_MESSAGES), names.OUTPUT_MESSAGES, left_out)
    for message in _readable(given, left_out):
        made = from_parts({"role": "assistant", **message}, left_out)[0]
        messages.append(with_reason(made, message))
    return messages


def _readable(given: Any, left_out: Counter[str]) -> list[Mapping[str, Any]]:
    messages = _as_list(given)
    readable = [message for message in messages if isinstance(message, Mapping)]
    if len(readable) < len(messages):
        left_out["message_not_readable"] += len(messages) - len(readable)
    return readable


def _openinference(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose fields are attributes with dotted, numbered names."""
    message: dict[str, Any] = {
        "role": str(fields.get("message.role") or "user"),
        "content": fields.get("message.content"),
    }
    if message["content"] is None and (contents := numbered(fields, "message.contents")):
        texts = [str(part.get("message_content.text") or "") for part in contents]
        message["content"] = "\n".join(text for text in texts if text)
    message |= {name: fields[key] for name in ("tool_call_id", "name") if fields.get(key := f"message.{name}")}
    calls = [
        tool_call(*(call.get(f"tool_call.{key}") for key in ("id", "function.name", "function.arguments")))
        for call in numbered(fields, "message.tool_calls")
    ]
    return {**message, "tool_calls": calls} if calls else message


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [{"role": "user", "content": as_text(value)}]


def first(found: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of these attributes that has one."""
    return next((found[key] for key in keys if found.get(key) is not None), None)
