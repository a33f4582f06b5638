"""Traces as Langfuse exports them, as spans.

Read are a trace as its page downloads it (`{"trace": ..., "observations": [...]}`) and as its API gives it, and rows of
observations: a page of the API, the export of the table, the export to blob storage with names in snake case. Names are
those of langfuse 5.0 (`ObservationV2`), contents those that its OpenAI, LangChain and OpenTelemetry integrations write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.messages import as_text, decoded, field, mapping, to_parts, tool_call
from cotune.integrations.exchange.otel.phoenix import nanoseconds
from cotune.integrations.exchange.otel.spans import Span, SpanEvent

_OPERATIONS = {"GENERATION": names.CHAT, "AGENT": names.AGENT, "TOOL": names.TOOL}
_TYPED = {
    *names.PARAMS.values(), names.REQUEST_STREAM, names.FINISH_REASONS, names.TRAINING_STEP, names.ROLLOUT, names.STEP,
    names.TURN, names.CHOSEN, names.CANDIDATES, names.ATTEMPTS, names.POLICY_VERSION, names.PROMPT_IDS,
}  # fmt: skip
"""Attributes that are no text: Langfuse keeps them as JSON text."""
_SPEAKERS = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}
"""Roles of messages in LangChain's words."""


class Observations:
    """Gathers the parts of a file, which come in any order."""

    def __init__(self, left_out: Counter[str]) -> None:
        self._left_out = left_out
        self._traces: dict[str, Mapping[str, Any]] = {}
        self._rows: dict[str, list[Mapping[str, Any]]] = {}
        self._scores: dict[str, list[SpanEvent]] = {}

    def add(self, value: Mapping[str, Any]) -> bool:
        """Take a trace with its observations, or an observation; False for anything else."""
        if isinstance(value.get("observations"), list):
            trace = mapping(value.get("trace")) or value
            id = str(trace.get("id") or "")
            self._traces[id] = trace
            for row in value["observations"]:
                if isinstance(row, Mapping):
                    self._rows.setdefault(id, []).append(row)
                else:
                    self._left_out["observation_not_fetched"] += 1
            for score in map(mapping, trace.get("scores") or value.get("scores") or ()):
                attributes, comment = {names.EVALUATION_NAME: score.get("name")}, score.get("comment")
                if isinstance(score.get("value"), int | float):
                    attributes[names.EVALUATION_VALUE] = float(score["value"])
                elif isinstance(comment, str) and comment.strip():  # its category is lost, though its text is read
                    self._left_out["evaluation_without_score"] += 1
                if isinstance(comment, str):
                    attributes[names.EVALUATION_EXPLANATION] = comment
                event = SpanEvent(names.EVALUATION, nanoseconds(score.get("timestamp")), attributes)
                self._scores.setdefault(str(field(score, "observationId") or id), []).append(event)
            return True
        id, kind = field(value, "traceId"), value.get("type")
        if not id or not isinstance(kind, str) or field(value, "startTime") is None:
            return False
        self._rows.setdefault(str(id), []).append(value)
        return True

    def spans(self) -> Iterator[Span]:
        """The spans of all traces, each below a workflow's, which is the episode."""
        for id, rows in self._rows.items():
            yield from self._trace(id, rows)

    def _trace(self, id: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Span]:
        trace = self._traces.get(id, {})
        known = {str(row.get("id")) for row in rows}
        spans = [self._span(id, row, known) for row in rows]
        roots = [span for span in spans if span.parent == id]
        if len(roots) == 1 and roots[0].attributes.get(names.OPERATION) == names.WORKFLOW:
            scores = tuple(self._scores.get(id, ()))
            for span in spans:
                own = span is roots[0]
                yield msgspec.structs.replace(span, parent=None, events=span.events + scores) if own else span
            return
        named = next((span.name for span in roots), id)  # none where all say that they have a parent
        inputs = {str(row.get("id")): row.get("input") for row in rows}
        task = trace.get("input", inputs.get(roots[0].id) if len(roots) == 1 else None)
        start = min(span.start for span in spans)
        yield Span(
            trace=id, id=id, parent=None, name=str(trace.get("name") or field(rows[0], "traceName") or named),
            start=start, end=max(span.end for span in spans), events=tuple(self._scores.get(id, ())),
            attributes={names.OPERATION: names.WORKFLOW, names.TASK: id, names.TASK_INPUT: as_text(decoded(task))},
            failed=next((span.failed for span in roots if span.failed), None),
        )  # fmt: skip
        yield from spans

    def _span(self, trace: str, row: Mapping[str, Any], known: set[str]) -> Span:
        metadata = mapping(decoded(row.get("metadata")))
        kind = str(row.get("type") or "").upper()
        sent = mapping(metadata.get("attributes"))
        attributes = {name: decoded(value) if name in _TYPED else value for name, value in sent.items()}
        attributes |= {"metadata": metadata} if "langgraph_node" in metadata else {}
        attributes.setdefault(names.OPERATION, _OPERATIONS.get(kind, kind.lower()))
        if kind == "AGENT":
            attributes.setdefault(names.AGENT_NAME, str(row.get("name") or "").removeprefix(f"{names.AGENT} "))
        if kind == "GENERATION":
            attributes = {**self._generation(row), **attributes}
        parent = field(row, "parentObservationId")
        start = nanoseconds(field(row, "startTime"))
        failed = row.get("level") == "ERROR"
        return Span(
            trace=trace,
            id=str(row.get("id")),
            parent=str(parent) if str(parent) in known else trace,
            name=str(row.get("name") or ""),
            start=start,
            end=nanoseconds(field(row, "endTime")) or start,
            attributes=attributes,
            events=tuple(self._scores.get(str(row.get("id")), ())),
            failed=str(field(row, "statusMessage") or "error") if failed else None,
        )

    def _generation(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Request and answer, with names of the GenAI conventions."""
        asked, tools = _request(decoded(row.get("input")))
        usage = {**mapping(row.get("usage")), **mapping(decoded(field(row, "usageDetails")))}
        found: dict[str, Any] = {
            names.INPUT_MESSAGES: list(map(self._parts, asked)),
            names.OUTPUT_MESSAGES: list(map(self._parts, _answers(decoded(row.get("output"))))),
            names.REQUEST_MODEL: field(row, "providedModelName") or row.get("model"),
            names.INPUT_TOKENS: usage.get("input", field(row, "promptTokens")),
            names.OUTPUT_TOKENS: usage.get("output", field(row, "completionTokens")),
            names.TOOL_DEFINITIONS: tools,
            "llm.invocation_parameters": mapping(decoded(field(row, "modelParameters"))),
        }
        return {name: value for name, value in found.items() if value}

    def _parts(self, message: dict[str, Any]) -> dict[str, Any]:
        return message if "parts" in message else to_parts(message, self._left_out)


def _request(value: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages and tools of a request: a list of messages, an object with them, or a text."""
    given = mapping(value)
    tools = list(given.get("tools") or given.get("functions") or ())
    messages = given["messages"] if isinstance(given.get("messages"), list) else value
    asked = []
    for one in messages if isinstance(messages, list) else [] if messages is None else [messages]:
        content = mapping(mapping(one).get("content"))
        if mapping(one).get("role") == "tool" and ("function" in content or "parameters" in content):
            tools.append(content)  # how its LangChain handler writes the tools of a request
        else:
            asked.append(_message(one, "user"))
    return asked, tools


def _answers(value: Any) -> list[dict[str, Any]]:
    given = mapping(value)
    if isinstance(given.get("choices"), list):
        value = [mapping(one).get("message") for one in given["choices"]]
    elif isinstance(given.get("messages"), list):
        value = given["messages"]
    return [_message(one, "assistant") for one in (value if isinstance(value, list) else [value]) if one is not None]


def _message(value: Any, speaker: str) -> dict[str, Any]:
    """A message in OpenAI form, or as it is where it has parts; other JSON is the content of one by `speaker`."""
    given = mapping(value)
    if "parts" in given:  # came over OpenTelemetry
        return {"role": speaker, **given}
    if "content" not in given and "tool_calls" not in given:
        return {"role": speaker, "content": as_text(value)}
    role = given.get("role") or given.get("type") or speaker
    fields = ("content", "name", "tool_call_id", "reasoning_content")
    made = {name: given[name] for name in fields if given.get(name) is not None}
    calls = [
        call if "function" in call else tool_call(call.get("id"), call.get("name"), call.get("args"))
        for call in given.get("tool_calls") or ()
        if isinstance(call, Mapping)
    ]
    return {"role": _SPEAKERS.get(role, role), **made, **({"tool_calls": calls} if calls else {})}
