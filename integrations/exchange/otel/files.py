"""Reads spans from files of OTLP/JSON, written by a collector's file exporter or saved from an API."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.exchange.otel.otlp_json import spans_in
from cotune.integrations.exchange.otel.spans import Span

_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read(path: str | Path, left_out: Counter[str]) -> Iterator[Span]:
    """The spans in a file: one JSON value, a list of them, an API's page (`{"data": [...]}`), or one value per line.

    Values that are not OTLP are counted in `left_out`. Raises ConfigError for a file without spans.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            "file", str(path), "does not exist", "Pass a file of OTLP/JSON, such as a collector's file exporter writes."
        )
    count = 0
    for value in _json_objects(path.read_bytes(), left_out):
        spans = spans_in(value)
        if spans is None:
            left_out["not_otlp"] += 1
            continue
        for span in spans:
            count += 1
            yield span
    if not count:
        raise ConfigError(
            "file",
            str(path),
            "holds no spans in OTLP/JSON (resourceSpans / scopeSpans / spans)",
            "docs/how-to/opentelemetry.md says how to get OTLP from Phoenix and Langfuse.",
        )


def _json_objects(raw: bytes, left_out: Counter[str]) -> Iterator[Mapping[str, Any]]:
    """The JSON objects in a file. Objects in lists and pages are returned one by one."""
    # 1. The file is one JSON value, or has one in each line.
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        values = [msgspec.json.decode(raw)]
    except _NOT_JSON:
        values = []
        for line in raw.splitlines():
            if line.strip():
                try:
                    values.append(msgspec.json.decode(line))
                except _NOT_JSON:
                    left_out["line_not_json"] += 1

    # 2. A value is an object, a list of objects, or a page of an API with a list under `data`.
    for value in values:
        if isinstance(value, list):
            items = value
        elif isinstance(value, Mapping) and isinstance(value.get("data"), list):
            items = value["data"]
        else:
            items = [value]
        for item in items:
            if isinstance(item, Mapping):
                yield item
            else:
                left_out["not_otlp"] += 1
