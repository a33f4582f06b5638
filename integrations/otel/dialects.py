"""What LLM spans of other tools say: kind, agent, model, parameters, messages, in the dialects that are in use.

Read are OpenTelemetry's GenAI conventions (as attributes, as JSON text, and as the older events), the indexed
`gen_ai.prompt.N.*` attributes before them, and OpenInference's `llm.*`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from cotune.integrations.otel import names as names
from cotune.integrations.otel.messages import as_text, decoded, from_parts, tool_call
from cotune.integrations.otel.spans import Span

Kind = Literal["workflow", "agent", "chat", "tool", "other"]

_OPERATIONS: dict[str, Kind] = {
    names.WORKFLOW: "workflow",
    names.AGENT: "agent",
    "create_agent": "other",
    names.TOOL: "tool",
    names.CHAT: "chat",
    "generate_content": "chat",
    "text_completion": "chat",
}
_OPENINFERENCE: dict[str, Kind] = {"LLM": "chat", "AGENT": "agent", "TOOL": "tool"}
_TRACELOOP: dict[str, Kind] = {"workflow": "workflow", "agent": "agent", "tool": "tool"}
_DETAILS = "gen_ai.client.inference.operation.details"
_OLD_EVENTS = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}


def kind_of(span: Span) -> Kind:
    """What a span stands for."""
    found = span.attributes
    operation = found.get(names.OPERATION)
    if operation is not None:
        return _OPERATIONS.get(str(operation), "other")
    if "openinference.span.kind" in found:
        return _OPENINFERENCE.get(str(found["openinference.span.kind"]).upper(), "other")
    if "traceloop.span.kind" in found:
        return _TRACELOOP.get(str(found["traceloop.span.kind"]), "other")
    if found.get("llm.request.type") in ("chat", "completion"):
        return "chat"
    return "other"


def agent_of(span: Span) -> str | None:
    """The agent that a span names: itself an agent's, or a node's of a graph."""
    found = span.attributes
    for name in (names.ROLE, names.AGENT_NAME, "agent.name"):
        if found.get(name):
            return str(found[name])
    if kind_of(span) == "agent":
        return str(found.get("traceloop.entity.name") or span.name)
    metadata = decoded(found.get("metadata"))
    node = metadata.get("langgraph_node") if isinstance(metadata, Mapping) else None
    node = node or found.get("traceloop.association.properties.langgraph_node")
    return str(node) if node else None


def model_of(found: Mapping[str, Any]) -> str:
    return str(_first(found, names.REQUEST_MODEL, "llm.model_name", "gen_ai.response.model") or "")


def params_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Request parameters in OpenAI form."""
    made = decoded(found.get("llm.invocation_parameters"))
    params = {k: v for k, v in made.items() if k not in ("model", "messages", "tools")} if _is_map(made) else {}
    params |= {name: found[key] for name, key in names.PARAMS.items() if found.get(key) is not None}
    if found.get(names.OUTPUT_TYPE) == "json":
        params.setdefault("response_format", {"type": "json_object"})
    return params


def usage_of(found: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens; 0 where they are not told."""
    prompt = _first(found, names.INPUT_TOKENS, "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
    completion = _first(found, names.OUTPUT_TOKENS, "gen_ai.usage.completion_tokens", "llm.token_count.completion")
    return int(prompt or 0), int(completion or 0)


def finish_reasons(found: Mapping[str, Any]) -> list[str]:
    reasons = found.get(names.FINISH_REASONS)
    return [str(reason) for reason in reasons] if isinstance(reasons, Sequence) and not isinstance(reasons, str) else []


def messages_of(span: Span, left_out: Counter[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages of the request and of the answer, in OpenAI form; an answer's may carry a `finish_reason`."""
    events = {event.name: event.attributes for event in span.events}
    for found in (span.attributes, events.get(_DETAILS) or {}):
        if names.INPUT_MESSAGES in found or names.OUTPUT_MESSAGES in found:
            return _conventions(found, left_out)
    if any(event.name in _OLD_EVENTS or event.name == "gen_ai.choice" for event in span.events):
        return _old_events(span)
    for prefix, answer, inner in (
        ("gen_ai.prompt", "gen_ai.completion", ""),
        ("llm.input_messages", "llm.output_messages", "message"),
    ):
        asked = [_indexed(one, inner) for one in _items(span.attributes, prefix)]
        said = [_indexed(one, inner) for one in _items(span.attributes, answer)]
        if asked or said:
            return asked, said
    return [], []


def tools_of(found: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Tool definitions in OpenAI form, None where there are none."""
    given = decoded(found.get(names.TOOL_DEFINITIONS))
    if not isinstance(given, list):
        given = [decoded(one.get("tool.json_schema")) for one in _items(found, "llm.tools")]
        given += [
            {
                "name": one.get("name"),
                "description": one.get("description"),
                "parameters": decoded(one.get("parameters")),
            }
            for one in _items(found, "llm.request.functions")
        ]
    made = [one if "function" in one else _tool(one) for one in map(decoded, given) if _is_map(one)]
    return made or None


def _tool(definition: Mapping[str, Any]) -> dict[str, Any]:
    function = {k: v for k, v in definition.items() if k != "type" and v is not None}
    return {"type": "function", "function": function}


def _conventions(found: Mapping[str, Any], left_out: Counter[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    system = decoded(found.get(names.SYSTEM_INSTRUCTIONS))
    asked = from_parts({"role": "system", "parts": _as_list(system)}, left_out) if system else []
    for message in _as_list(decoded(found.get(names.INPUT_MESSAGES))):
        if _is_map(message):
            asked += from_parts(message, left_out)
        else:
            left_out["message_not_readable"] += 1
    said = []
    for message in _as_list(decoded(found.get(names.OUTPUT_MESSAGES))):
        if _is_map(message):
            made = from_parts({"role": "assistant", **message}, left_out)[0]
            said.append({**made, "finish_reason": message["finish_reason"]} if message.get("finish_reason") else made)
        else:
            left_out["message_not_readable"] += 1
    return asked, said


def _old_events(span: Span) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One event per message, with its fields as attributes, or as a JSON text in one of them."""
    asked, said = [], []
    for event in span.events:
        body = decoded(event.attributes.get("body") or event.attributes.get("event_body"))
        fields = dict(body) if _is_map(body) else dict(event.attributes)
        if event.name in _OLD_EVENTS:
            asked.append(_openai(fields, _OLD_EVENTS[event.name]))
        elif event.name == "gen_ai.choice":
            inner = decoded(fields.get("message"))
            made = _openai(dict(inner) if _is_map(inner) else fields, "assistant")
            reason = fields.get("finish_reason")
            said.append({**made, "finish_reason": str(reason)} if reason else made)
    return asked, said


def _openai(fields: Mapping[str, Any], role: str) -> dict[str, Any]:
    content = fields.get("content")
    made: dict[str, Any] = {"role": str(fields.get("role") or role), "content": content}
    id = fields.get("tool_call_id") or (fields.get("id") if role == "tool" else None)
    if id:
        made["tool_call_id"] = id
    if calls := decoded(fields.get("tool_calls")):
        made["tool_calls"] = [_call(one) for one in calls if _is_map(one)]
    return made


def _call(one: Mapping[str, Any]) -> dict[str, Any]:
    function = one.get("function") or one
    return tool_call(one.get("id"), function.get("name"), function.get("arguments"))


def _indexed(one: Mapping[str, Any], inner: str) -> dict[str, Any]:
    """A message whose fields are attributes with dotted, numbered names."""
    start = f"{inner}." if inner else ""
    fields = {key.removeprefix(start): value for key, value in one.items()}
    made: dict[str, Any] = {"role": str(fields.get("role") or "user"), "content": fields.get("content")}
    if made["content"] is None and (contents := list(_items(fields, "contents"))):
        texts = [str(part.get("message_content.text") or "") for part in contents]
        made["content"] = "\n".join(text for text in texts if text)
    for name in ("tool_call_id", "name", "finish_reason"):
        if fields.get(name):
            made[name] = fields[name]
    calls = []
    for call in _items(fields, "tool_calls"):
        got = {key.removeprefix("tool_call.").removeprefix("function."): value for key, value in call.items()}
        calls.append(tool_call(got.get("id"), got.get("name"), got.get("arguments")))
    if calls:
        made["tool_calls"] = calls
    return made


def _items(found: Mapping[str, Any], prefix: str) -> Iterable[dict[str, Any]]:
    """Attributes `prefix.N.rest`, by N: each as a mapping of its rests."""
    items: dict[int, dict[str, Any]] = {}
    for key, value in found.items():
        if key.startswith(f"{prefix}."):
            number, _, rest = key[len(prefix) + 1 :].partition(".")
            if number.isdigit():
                items.setdefault(int(number), {})[rest] = value
    return [items[number] for number in sorted(items)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [{"role": "user", "content": as_text(value)}]


def _first(found: Mapping[str, Any], *keys: str) -> Any:
    return next((found[key] for key in keys if found.get(key) is not None), None)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)
