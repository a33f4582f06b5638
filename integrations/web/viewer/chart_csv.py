"""Writes a chart as CSV, with exact figures."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from starlette.responses import Response, StreamingResponse

from cotune.reading.curves import Chart

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes of texts that a spreadsheet would run as a formula."""


def chart_as_csv(chart: Chart) -> Response:
    """A CSV file with a row for each step, and a column for each line and each end of its interval."""
    columns: list[tuple[str, list[float | None]]] = []
    for line in chart.series:
        columns.append((line.label, line.values))
        if line.low is not None and line.high is not None:
            columns += [(f"{line.label}, low", line.low), (f"{line.label}, high", line.high)]
    rows: list[list[Any]] = [["step", *(name for name, _ in columns)]]
    for position, step in enumerate(chart.steps):
        rows.append([step, *(values[position] for _, values in columns)])
    file_name = re.sub(r"[^A-Za-z0-9_-]", "_", chart.id)[:100]
    headers = {"content-disposition": f'attachment; filename="{file_name}.csv"'}
    return StreamingResponse(map(_line, rows), media_type="text/csv; charset=utf-8", headers=headers)


def _line(cells: list[Any]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(["" if cell is None else _harmless(cell) for cell in cells])
    return out.getvalue()


def _harmless(cell: Any) -> Any:
    """A cell that no spreadsheet runs as a formula. Texts of models and applications are not trusted."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
