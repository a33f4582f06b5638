"""Spans as Phoenix exports them: from its REST API, or a data frame of spans written as JSON records.

The form is that of arize-phoenix-client 3.5: `context`, `span_kind`, times in ISO 8601, OpenInference attributes with
dotted names, where a data frame has them in columns `attributes.*`. Nested attributes are read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from cotune.integrations.exchange.otel.spans import Span, SpanEvent

_WHOLE = ("metadata", "llm.invocation_parameters", "json_schema", "variables", ".value", "function.arguments")
"""Ends of names whose values are one object, not attributes below them."""


def is_row(value: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a span of Phoenix."""
    return "context.span_id" in value or (isinstance(value.get("context"), Mapping) and "span_id" in value["context"])


def span_of(row: Mapping[str, Any]) -> Span:
    """A row as a span."""
    context = row.get("context") or {}
    attributes = dict(_flat(row.get("attributes") or {}))
    attributes |= dict(_flat({k.removeprefix("attributes."): v for k, v in row.items() if k.startswith("attributes.")}))
    if row.get("span_kind"):
        attributes.setdefault("openinference.span.kind", row["span_kind"])
    failed = str(row.get("status_code") or "").upper() == "ERROR"
    start = nanoseconds(row.get("start_time"))
    return Span(
        trace=str(context.get("trace_id") or row.get("context.trace_id") or ""),
        id=str(context.get("span_id") or row.get("context.span_id")),
        parent=str(row["parent_id"]) if row.get("parent_id") else None,
        name=str(row.get("name") or ""),
        start=start,
        end=nanoseconds(row.get("end_time")) or start,
        attributes=attributes,
        events=tuple(
            SpanEvent(str(event.get("name") or ""), nanoseconds(event.get("timestamp")), event.get("attributes") or {})
            for event in row.get("events") or ()
            if isinstance(event, Mapping)
        ),
        failed=str(row.get("status_message") or "error") if failed else None,
    )


def nanoseconds(value: Any) -> int:
    """A time in ISO 8601 (UTC where it names no zone), or in milliseconds since 1970; 0 where it is neither."""
    try:
        if isinstance(value, int | float):
            return int(value * 1_000_000)
        time = datetime.fromisoformat(str(value))
    except (ValueError, OverflowError):
        return 0
    time = time if time.tzinfo else time.replace(tzinfo=UTC)
    whole = int(time.replace(microsecond=0).timestamp())
    return whole * 1_000_000_000 + time.microsecond * 1_000


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested attributes by their dotted names, lists of objects by number."""
    if isinstance(value, Mapping) and not name.endswith(_WHOLE):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{number}")
    elif value is not None:
        yield name, value
