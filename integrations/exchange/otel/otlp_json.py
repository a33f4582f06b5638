"""Encodes and decodes spans in the JSON form of OTLP (`resourceSpans`), which collectors write and read."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cotune.integrations.exchange.otel.messages import as_mapping, field, list_of_objects
from cotune.integrations.exchange.otel.spans import Span, SpanEvent

SCOPE = "cotune"
_KINDS = {"internal": 1, "client": 3}
_FAILED = 2
_HEX = re.compile(r"[0-9a-fA-F]+")


def encode(spans: Iterable[Span], service: str) -> bytes:
    """One line with an export request of these spans."""
    resource = {"attributes": _attributes({"service.name": service})}
    body = {"resource": resource, "scopeSpans": [{"scope": {"name": SCOPE}, "spans": [_span(s) for s in spans]}]}
    return msgspec.json.encode({"resourceSpans": [body]})


def spans_in(value: Mapping[str, Any]) -> Iterator[Span] | None:
    """The spans of an export request, of a trace of MLflow's API (an object with `spans`), or of a single span.

    None for any other object.
    """
    if field(value, "startTimeUnixNano") is not None:
        return iter([_decode_span(value)])
    # MLflow's API has a trace in an object `{"trace": ...}`.
    request = value.get("trace") or value
    if "resourceSpans" in request or "resource_spans" in request:
        return _spans_of_request(request)
    spans = list_of_objects(request, "spans")
    return map(_decode_span, spans) if spans else None


def _spans_of_request(request: Mapping[str, Any]) -> Iterator[Span]:
    for resource in list_of_objects(request, "resourceSpans"):
        for scope in list_of_objects(resource, "scopeSpans"):
            yield from map(_decode_span, list_of_objects(scope, "spans"))


def _span(span: Span) -> dict[str, Any]:
    """A span in OTLP's JSON form. Its 64-bit numbers are texts, as the format requires."""
    encoded: dict[str, Any] = {
        "traceId": span.trace,
        "spanId": span.id,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _attributes(span.attributes),
        "status": {} if span.failed is None else {"code": _FAILED, "message": span.failed},
    }
    if span.parent is not None:
        encoded["parentSpanId"] = span.parent
    if span.events:
        encoded["events"] = []
        for event in span.events:
            attributes = _attributes(event.attributes)
            encoded["events"].append({"name": event.name, "timeUnixNano": str(event.at), "attributes": attributes})
    if span.links:
        encoded["links"] = [{"traceId": span.trace, "spanId": link} for link in span.links]
    return encoded


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _encode_value(value)} for key, value in values.items()]


def _encode_value(value: Any) -> dict[str, Any]:
    """An attribute's value in OTLP's JSON form, which names its type. Integers are texts there, as JSON's are not
    exact.
    """
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case Mapping():
            return {"kvlistValue": {"values": _attributes(value)}}
        case None:
            return {}
    return {"arrayValue": {"values": [_encode_value(item) for item in value]}}


def _decode_span(span: Mapping[str, Any]) -> Span:
    """A span from OTLP's JSON form. Kinds and status codes may be numbers or names, depending on the exporter."""
    status = as_mapping(span.get("status"))
    failed = status.get("code") in (_FAILED, "STATUS_CODE_ERROR")
    start = _int(field(span, "startTimeUnixNano"))
    events = []
    for event in list_of_objects(span, "events"):
        at = _int(field(event, "timeUnixNano"))
        events.append(SpanEvent(str(event.get("name") or ""), at, _read_attributes(event.get("attributes"))))
    return Span(
        trace=_id(field(span, "traceId"), 32),
        id=_id(field(span, "spanId"), 16),
        parent=_id(field(span, "parentSpanId"), 16) or None,
        name=str(span.get("name") or ""),
        kind="client" if span.get("kind") in (3, "SPAN_KIND_CLIENT") else "internal",
        start=start,
        end=_int(field(span, "endTimeUnixNano")) or start,
        attributes=_read_attributes(span.get("attributes")),
        events=tuple(events),
        links=tuple(_id(field(link, "spanId"), 16) for link in list_of_objects(span, "links")),
        failed=str(status.get("message") or "error") if failed else None,
    )


def _read_attributes(value: Any) -> dict[str, Any]:
    """Attributes as a plain mapping, from OTLP's list of pairs or from a mapping that some tools write."""
    if isinstance(value, Mapping):
        return dict(value)
    pairs = value if isinstance(value, Sequence) else ()
    return {str(pair.get("key")): _read_value(pair.get("value")) for pair in pairs if isinstance(pair, Mapping)}


def _read_value(value: Any) -> Any:
    """A value of an attribute in OTLP's JSON form, in either spelling of its field names."""
    if not isinstance(value, Mapping):
        return value
    for key, content in value.items():
        if content is None:  # Phoenix writes all alternatives, of which one has a value
            continue
        match key.replace("_", "").lower():
            case "intvalue":
                return _int(content)
            case "arrayvalue":
                items = as_mapping(content).get("values")
                return [_read_value(item) for item in items] if isinstance(items, list) else []
            case "kvlistvalue":
                return _read_attributes(as_mapping(content).get("values"))
            case "stringvalue" | "doublevalue" | "boolvalue" | "bytesvalue":
                return content
    return None


def _int(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0


def _id(value: Any, length: int) -> str:
    """An id as lower-case hex. Protobuf's own JSON form has base 64 instead."""
    text = str(value or "")
    if len(text) == length and _HEX.fullmatch(text):
        return text.lower()
    try:
        return base64.b64decode(text, validate=True).hex()
    except (binascii.Error, ValueError):
        return text
