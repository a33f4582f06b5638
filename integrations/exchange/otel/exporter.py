"""Exports recorded episodes as OpenTelemetry spans, to a file, to an OTLP endpoint, or to any span exporter.

It uses no tracer provider: finished spans are passed to an exporter directly, so the application's own OpenTelemetry
configuration is neither read nor changed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cotune.errors import ConfigError, CotuneError, install_extra
from cotune.integrations.exchange.otel.otlp_json import SCOPE, encode
from cotune.integrations.exchange.otel.spans import STRUCTURE, Detail, Span, episode_spans
from cotune.records.structs import Episode, Record
from cotune.storage.protocol import Store
from cotune.storage.whole_file import whole_file

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("cotune")
SERVICE = "cotune"
REQUEST = 2_000_000
"""Most characters of one request. Receivers refuse larger ones; Langfuse's limit is about 4 MB."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of an export. `left_out` counts data without a place in spans, by reason."""

    episodes: int
    spans: int
    left_out: Mapping[str, int]


def export_file(store: Store, path: str | Path, *, episode: str | None = None, detail: Detail = STRUCTURE) -> Exported:
    """Write OTLP/JSON, one line per episode: the form of a collector's file exporter and receiver."""
    with whole_file(path) as file:
        return _export_episodes(store, episode, detail, lambda spans: file.write(encode(spans, SERVICE) + b"\n"))


def export_to(
    store: Store, exporter: SpanExporter, *, episode: str | None = None, detail: Detail = STRUCTURE
) -> Exported:
    """Send every finished episode to a span exporter. Raises CotuneError if the exporter refuses one."""
    return _export_episodes(store, episode, detail, lambda spans: _send(exporter, spans))


def otlp_exporter(endpoint: str, headers: Mapping[str, str] | None = None, timeout: float = 60.0) -> SpanExporter:
    """An exporter to an OTLP/HTTP endpoint; `/v1/traces` is added to an address without a path."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise CotuneError("OpenTelemetry's exporter is not installed.", install_extra("otel")) from error
    scheme, _, location = endpoint.partition("://")
    if scheme not in ("http", "https") or not location:
        raise ConfigError("endpoint", endpoint, "is not an http or https address", "Example: http://127.0.0.1:4318")
    if "/" not in location.rstrip("/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, headers=dict(headers or {}), timeout=timeout)


class LiveExport:
    """A sink that stores records, and exports each ended episode in a separate thread.

    If the exporter fails, spans are lost, but never records. Failures are counted in `failed`, and logged once.
    """

    def __init__(self, store: Store, exporter: SpanExporter, *, detail: Detail = STRUCTURE) -> None:
        """Export episodes of `store` in a thread of its own as they end, so that no episode waits for the exporter."""
        self.store = store
        self.exporter = exporter
        self.detail = detail
        self.spans = 0
        self.failed = 0
        """Episodes whose spans could not be exported."""
        self.left_out: Counter[str] = Counter()
        self._ended: queue.SimpleQueue[Episode | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cotune-otel", daemon=True)
        self._thread.start()

    def write(self, records: Sequence[Record]) -> None:
        """Store the records; episodes among them are exported later."""
        self.store.write(records)
        for record in records:
            if isinstance(record, Episode):
                self._ended.put(record)

    def close(self) -> None:
        """Export the ended episodes, and shut down the exporter. The store stays open."""
        self._ended.put(None)
        self._thread.join()
        self.exporter.shutdown()

    def _work(self) -> None:
        """Loop of the thread: export ended episodes. A failure is counted and never stops the run."""
        while (episode := self._ended.get()) is not None:
            try:
                self.store.flush()
                spans = episode_spans(self.store, episode, self.detail, self.left_out)
                _send(self.exporter, spans)
                self.spans += len(spans)
            except Exception as error:  # noqa: BLE001
                if not self.failed:
                    log.warning("Spans of an episode could not be exported: %s", error)
                self.failed += 1


def _export_episodes(
    store: Store, only: str | None, detail: Detail, write: Callable[[Sequence[Span]], object]
) -> Exported:
    """Write the spans of all episodes, or of the episode `only`. Returns the numbers, and what was left out by
    reason.
    """
    left_out: Counter[str] = Counter()
    spans = episodes = 0
    for episode in store.episodes() if only is None else [store.episode(only)]:
        spans_of_episode = episode_spans(store, episode, detail, left_out)
        write(spans_of_episode)
        episodes += 1
        spans += len(spans_of_episode)
    if store.health.unreadable:
        left_out["unreadable"] += store.health.unreadable
    return Exported(episodes=episodes, spans=spans, left_out=dict(left_out))


def _send(exporter: SpanExporter, spans: Sequence[Span]) -> None:
    """Send spans in requests of bounded size. Raises CotuneError if a request is not delivered."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExportResult

    resource = Resource({"service.name": SERVICE})
    for part in _in_requests(spans):
        if exporter.export([_readable_span(span, resource) for span in part]) is not SpanExportResult.SUCCESS:
            raise CotuneError(
                f"The exporter {type(exporter).__name__} did not deliver {len(part)} spans.",
                "Check that the endpoint is right and takes OTLP over HTTP.",
            )


def _in_requests(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The spans in order, in parts of at most `REQUEST` characters. A larger span has a part of its own."""
    part: list[Span] = []
    size = 0
    for span in spans:
        span_size = sum(len(value) if isinstance(value, str) else 16 for value in span.attributes.values())
        if part and size + span_size > REQUEST:
            yield part
            part = []
            size = 0
        part.append(span)
        size += span_size
    if part:
        yield part


def _readable_span(span: Span, resource: Resource) -> ReadableSpan:
    """The span as a finished span of the SDK, created without a tracer."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(id: str) -> Any:
        return SpanContext(int(span.trace, 16), int(id, 16), is_remote=False, trace_flags=TraceFlags.get_default())

    return ReadableSpan(
        name=span.name,
        context=context(span.id),
        parent=None if span.parent is None else context(span.parent),
        resource=resource,
        attributes=span.attributes,
        events=[Event(e.name, e.attributes, e.at) for e in span.events],
        links=[Link(context(link)) for link in span.links],
        kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
        status=Status() if span.failed is None else Status(StatusCode.ERROR, span.failed),
        start_time=span.start,
        end_time=span.end,
        instrumentation_scope=InstrumentationScope(SCOPE),
    )
