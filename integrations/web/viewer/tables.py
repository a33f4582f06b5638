"""Any table of a page as CSV, with exact figures and all of its rows: the page is rendered again, and read."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cotune.integrations.web.viewer.rendering import exactly
from cotune.reading.curves import Chart

MOST_ROWS = 200_000
"""Rows of a file; the last line says where there are more."""
_PASSED_OVER = {"svg", "script", "style", "select", "button", "textarea", "template", "form"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a text begins with that a spreadsheet would take for a formula."""


def table_as_csv(answer: Callable[[Request], Response], request: Request) -> Response:
    """The table of a page that `csv` numbers, from 0, with the rows of its further pages."""
    asked = [pair for pair in request.query_params.multi_items() if pair[0] != "csv"]
    number = request.query_params["csv"]
    first = _page(answer, request, urlencode(asked))
    if not number.isdecimal() or int(number) >= len(first.tables):
        raise HTTPException(404, f"This page has no table {number[:20]}; it has {len(first.tables)}.")
    lines = _lines(answer, request, first, int(number))
    name = "-".join([*filter(None, request.url.path.split("/")), number]).removeprefix("run-") or "runs"
    return _file(lines, name)


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


def _lines(answer: Callable[[Request], Response], request: Request, page: _Tables, number: int) -> Iterator[list[str]]:
    header, count = page.headers[number], 0
    yield header
    while True:
        yield from page.tables[number] if number < len(page.tables) else ()
        count += len(page.tables[number]) if number < len(page.tables) else 0
        if not page.more:
            return
        if count >= MOST_ROWS:
            yield [f"more than {MOST_ROWS} rows: the rest is left out"]
            return
        page = _page(answer, request, urlsplit(page.more).query)


def _page(answer: Callable[[Request], Response], request: Request, query: str) -> _Tables:
    """The tables of a page with these parameters."""
    pairs = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "csv"]
    scope = {**request.scope, "query_string": urlencode(pairs).encode()}
    with exactly():
        body = bytes(answer(Request(scope)).body).decode()
    found = _Tables()
    found.feed(body)
    return found


class _Tables(HTMLParser):
    """Reads the tables in a page's HTML, without what is drawn and asked in them. A cell that spans several rows is in
    each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.headers: list[list[str]] = []
        self.more = ""
        """Address of the page with the next rows."""
        self._text: list[str] | None = None
        self._row: list[str] | None = None
        self._spans: dict[int, tuple[int, str]] = {}
        self._span = (1, 1)
        self._in_head = False
        self._over = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and "data-rows" in given:
            self.more = given.get("href") or ""
        if tag in _PASSED_OVER and self._row is not None:
            self._over += 1
        if tag == "table":
            self.tables.append([])
            self.headers.append([])
            self._spans = {}
        elif tag == "thead":
            self._in_head = True
        elif tag == "tr" and self.tables:
            self._row = []
        elif tag in ("td", "th") and self._row is not None:
            self._fill()
            self._text = []
            self._span = (int(given.get("rowspan") or 1), int(given.get("colspan") or 1))

    def handle_endtag(self, tag: str) -> None:
        if tag in _PASSED_OVER and self._row is not None:
            self._over = max(0, self._over - 1)
        if tag == "thead":
            self._in_head = False
        elif tag in ("td", "th") and self._text is not None and self._row is not None:
            text, (rows, columns) = " ".join("".join(self._text).split()), self._span
            if rows > 1:
                self._spans[len(self._row)] = (rows - 1, text)
            self._row += [text] + [""] * (columns - 1)
            self._text = None
        elif tag == "tr" and self._row is not None:
            self._fill()
            if self._in_head:
                self.headers[-1] = self._row
            else:
                self.tables[-1].append(self._row)
            self._row = None

    def handle_data(self, data: str) -> None:
        if self._text is not None and not self._over:
            self._text.append(data + " ")

    def _fill(self) -> None:
        """Put the cells that reach down from rows above before the next one of this row."""
        assert self._row is not None
        while len(self._row) in self._spans:
            rows, text = self._spans.pop(place := len(self._row))
            if rows > 1:
                self._spans[place] = (rows - 1, text)
            self._row.append(text)
