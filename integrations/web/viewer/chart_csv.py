"""A chart as CSV, with exact figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response, StreamingResponse

from cotune.reading.curves import Chart

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a text that a spreadsheet would take for a formula."""


def chart_as_csv(chart: Chart) -> Response:
    """A chart with a row for each step and a column for each line and each end of its interval."""
    columns: list[tuple[str, list[float | None]]] = []
    for line in chart.series:
        columns.append((line.label, line.values))
        if line.low is not None and line.high is not None:
            columns += [(f"{line.label}, low", line.low), (f"{line.label}, high", line.high)]
    rows = [[step, *(values[place] for _, values in columns)] for place, step in enumerate(chart.steps)]
    return _file([["step", *(name for name, _ in columns)], *rows], chart.id)


def _file(rows: Iterable[list[Any]], name: str) -> Response:
    named = "".join(sign if (sign.isalnum() and sign.isascii()) or sign in "-_" else "_" for sign in name)[:100]
    headers = {"content-disposition": f'attachment; filename="{named}.csv"'}
    return StreamingResponse(map(_line, rows), media_type="text/csv; charset=utf-8", headers=headers)


def _line(cells: list[Any]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(["" if cell is None else _harmless(cell) for cell in cells])
    return out.getvalue()


def _harmless(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: texts come from models and applications."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
