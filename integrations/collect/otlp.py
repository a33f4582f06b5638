"""Spans that arrive by OTLP over HTTP, as JSON or protobuf, as records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cotune.errors import install_extra
from cotune.integrations.exchange.otel.importer import import_spans
from cotune.integrations.exchange.otel.otlp_json import spans_in
from cotune.integrations.exchange.otel.spans import Span
from cotune.integrations.web.http.bodies import decoded
from cotune.integrations.web.http.requests import RequestError, json_bytes
from cotune.records.structs import Record

PATH = "/v1/traces"
PROTOBUF = "application/x-protobuf"
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def read_spans(body: bytes, kind: str, most_values: int) -> tuple[list[Span], str]:
    """The spans of an export request, and the name of the service that sends them, written as an application's name.

    Raises RequestError for a body that is no export request.
    """
    export_request: Any = _from_protobuf(body) if kind == PROTOBUF else decoded(body, dict[str, Any], most_values)
    try:
        return list(spans_in(export_request) or ()), _service_name(export_request)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise RequestError(400, f"The spans cannot be read: {error}.", code="invalid_value") from None


def records_of(spans: Sequence[Span], left_out: Counter[str]) -> list[Record]:
    """The records of the LLM calls among some spans. Spans that cannot be mapped are counted by reason."""
    span_ids = {span.id for span in spans}
    sink = _MemorySink()
    import_spans(spans, sink, left_out, phase="trace")
    orphans = sum(span.parent is not None and span.parent not in span_ids for span in spans)
    if orphans:
        left_out["parent_in_another_request"] += orphans
    return sink.records


def response_body(kind: str, rejected: int, reasons: Mapping[str, int]) -> bytes:
    """The answer to an export request, with how many spans of LLM calls were not stored (OTLP's partial success)."""
    if not reasons:
        return b"" if kind == PROTOBUF else b"{}"
    message = "Records are refused: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()) + "."
    if kind == PROTOBUF:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTracePartialSuccess,
            ExportTraceServiceResponse,
        )

        part = ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
        body: bytes = ExportTraceServiceResponse(partial_success=part).SerializeToString()
        return body
    # 64-bit numbers are texts in the JSON form of protobuf.
    return json_bytes({"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": message}})


class _MemorySink:
    """A sink that collects records in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records += records


def _from_protobuf(body: bytes) -> dict[str, Any]:
    """Decode an OTLP request in protobuf to the dictionary that its JSON form would have, so that both are read by the
    same code. Raises RequestError.
    """
    try:
        from google.protobuf.json_format import MessageToDict
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError:
        text = f"The collector cannot read protobuf. Send application/json, or install it. {install_extra('otel')}"
        raise RequestError(415, text, code="unsupported_media_type") from None
    try:
        export_request: dict[str, Any] = MessageToDict(ExportTraceServiceRequest.FromString(body))
    except (DecodeError, RecursionError, ValueError) as error:
        raise RequestError(400, f"The body is no OTLP request: {error}.", code="invalid_value") from None
    return export_request


def _service_name(export_request: Mapping[str, Any]) -> str:
    """The first `service.name` of an export request, in letters that an application's name may have. It is "otel" if
    there is none.
    """
    for resource_spans in export_request.get("resourceSpans") or ():
        resource = resource_spans.get("resource") or {}
        for attribute in resource.get("attributes") or ():
            if attribute.get("key") == "service.name":
                value = attribute.get("value") or {}
                name = _NO_NAME.sub("-", str(value.get("stringValue") or "")).strip("-._")
                return name[:64] or "otel"
    return "otel"
