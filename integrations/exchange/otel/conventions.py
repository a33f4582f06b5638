"""Reads the contents of an LLM span: kind, agent, model, parameters, messages, tools.

It reads two conventions: OpenTelemetry's for GenAI (in attributes, in JSON texts in them, and in the event
`gen_ai.client.inference.operation.details`), and OpenInference's `llm.*`. `earlier_forms` reads messages of OpenLLMetry
and messages in separate events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.earlier_forms import event_messages, openllmetry_messages, openllmetry_tools
from cotune.integrations.exchange.otel.messages import (
    as_mapping,
    as_text,
    decode_json,
    fields_by_number,
    from_parts,
    json_value,
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
    """The kind of a span, in whichever convention it is written."""
    operation = span.attributes.get(names.OPERATION)
    if operation is not None:
        return _OPERATIONS.get(str(operation), "other")
    for key, kinds in (("llm.request.type", _OPENLLMETRY), ("traceloop.span.kind", _TRACELOOP)):
        kind = kinds.get(str(span.attributes.get(key)).lower())
        if kind is not None:
            return kind
    return _OPENINFERENCE.get(str(span.attributes.get(names.SPAN_KIND)).upper(), "other")


def agent_of(span: Span) -> str | None:
    """The agent that a span names in any convention, or its LangGraph node; None without one."""
    for key in (names.ROLE, names.AGENT_NAME, "agent.name"):
        if agent := span.attributes.get(key):
            return str(agent)
    if kind_of(span) == "agent" and (agent := span.attributes.get("traceloop.entity.name") or span.name):
        return str(agent)
    node = as_mapping(decode_json(span.attributes.get("metadata"))).get("langgraph_node")
    return str(node) if node else None


def params_of(attributes: Mapping[str, Any], left_out: Counter[str]) -> dict[str, Any]:
    """Request parameters in OpenAI form."""
    name = "llm.invocation_parameters"
    openinference = as_mapping(json_value(attributes.get(name), name, left_out))
    params = {key: value for key, value in openinference.items() if key not in ("model", "messages", "tools")}
    for param, attribute in names.PARAMS.items():
        if attributes.get(attribute) is not None:
            params[param] = attributes[attribute]
    if attributes.get(names.OUTPUT_TYPE) == "json":
        params.setdefault("response_format", {"type": "json_object"})
    return params


def count_or_zero(value: Any) -> int:
    """A count in a span; 0 if the value is no usable number."""
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return count if 0 <= count < MOST else 0


def messages_of(span: Span, left_out: Counter[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages of the request and of the answer, in OpenAI form. Messages of the answer may have a `finish_reason`.

    If the prompt is incomplete, its answer is left out as well.
    """
    # The conventions are tried from the newest to the oldest: OpenTelemetry's, which has messages in the span or in an
    # event, then OpenInference, OpenLLMetry, and OpenTelemetry's older form with an event for each message.
    details = [event.attributes for event in span.events if event.name == _DETAILS]
    for attributes in (span.attributes, *details):
        if names.INPUT_MESSAGES in attributes or names.OUTPUT_MESSAGES in attributes:
            genai_request = _request_messages(attributes, left_out)
            if genai_request is None:
                return [], []
            return genai_request, _answer_messages(attributes, left_out)
    request = [_openinference_message(fields) for fields in fields_by_number(span.attributes, "llm.input_messages")]
    answers = [_openinference_message(fields) for fields in fields_by_number(span.attributes, "llm.output_messages")]
    if not request and not answers:
        request, answers = openllmetry_messages(span.attributes, left_out)
    if not request and not answers:
        request, answers = event_messages(span.events, left_out)
    return request, answers


def tools_of(attributes: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]] | None:
    """Tool definitions in OpenAI form; None without any."""
    # OpenTelemetry's convention first, then OpenInference's and OpenLLMetry's.
    definitions = json_value(attributes.get(names.TOOL_DEFINITIONS), names.TOOL_DEFINITIONS, left_out)
    if not isinstance(definitions, list):
        definitions = [fields.get("tool.json_schema") for fields in fields_by_number(attributes, "llm.tools")]
        if not definitions:
            definitions = openllmetry_tools(attributes, left_out)
    tools = []
    for definition in definitions:
        tool = as_mapping(json_value(definition, "llm.tools", left_out))
        if not tool:
            continue
        # The conventions have the fields of a function next to its type, OpenAI below `function`.
        if "function" not in tool and tool.get("type", "function") == "function":
            function = {key: value for key, value in tool.items() if key != "type" and value is not None}
            tools.append({"type": "function", "function": function})
        else:
            tools.append(dict(tool))
    return tools or None


def _request_messages(attributes: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]] | None:
    """The messages of a request; None if one of its attributes was cut."""
    system = json_value(attributes.get(names.SYSTEM_INSTRUCTIONS), names.SYSTEM_INSTRUCTIONS, left_out)
    inputs = json_value(attributes.get(names.INPUT_MESSAGES), names.INPUT_MESSAGES, left_out)
    for name, value in ((names.SYSTEM_INSTRUCTIONS, system), (names.INPUT_MESSAGES, inputs)):
        if value is None and attributes.get(name) is not None:
            return None
    messages = from_parts({"role": "system", "parts": _as_list(system)}, left_out) if system else []
    for message in _readable_messages(inputs, left_out):
        messages += from_parts(message, left_out)
    return messages


def _answer_messages(attributes: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]]:
    """The messages of an answer, with their finish reasons."""
    messages = []
    outputs = json_value(attributes.get(names.OUTPUT_MESSAGES), names.OUTPUT_MESSAGES, left_out)
    for message in _readable_messages(outputs, left_out):
        answer = from_parts({"role": "assistant", **message}, left_out)[0]
        messages.append(with_reason(answer, message))
    return messages


def _readable_messages(value: Any, left_out: Counter[str]) -> list[Mapping[str, Any]]:
    """The messages in a decoded attribute. Items of another form are counted in `left_out`."""
    messages = _as_list(value)
    readable = [message for message in messages if isinstance(message, Mapping)]
    if len(readable) < len(messages):
        left_out["message_not_readable"] += len(messages) - len(readable)
    return readable


def _openinference_message(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message in OpenAI form, from the attributes of one message in OpenInference's convention.

    Lists are spread over attributes with numbers in their names, such as `message.contents.0.message_content.text`.
    """
    message: dict[str, Any] = {
        "role": str(fields.get("message.role") or "user"),
        "content": fields.get("message.content"),
    }
    if message["content"] is None and (contents := fields_by_number(fields, "message.contents")):
        texts = [str(part.get("message_content.text") or "") for part in contents]
        message["content"] = "\n".join(text for text in texts if text)
    for name in ("tool_call_id", "name"):
        if value := fields.get(f"message.{name}"):
            message[name] = value
    calls = []
    for call in fields_by_number(fields, "message.tool_calls"):
        function = call.get("tool_call.function.name")
        arguments = call.get("tool_call.function.arguments")
        calls.append(tool_call(call.get("tool_call.id"), function, arguments))
    return {**message, "tool_calls": calls} if calls else message


def _as_list(value: Any) -> list[Any]:
    """A list as it is; any other value as the text of one message of the user."""
    if isinstance(value, list):
        return value
    return [] if value is None else [{"role": "user", "content": as_text(value)}]


def first_value(attributes: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of these attributes that is not None."""
    return next((attributes[key] for key in keys if attributes.get(key) is not None), None)
