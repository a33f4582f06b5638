"""The style of all printed tables and lines: colours, columns, counts and rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from cotune.records.images import content_text
from cotune.records.structs import Candidate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

GOOD = "green"
BAD = "red"
QUIET = "dim"
NAME = "cyan"
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24
"""Maximum number of characters of a curve. In a run with more steps, several steps share a character."""
_BETWEEN = 2
"""Number of spaces between two columns."""
_WORD = 40
"""Maximum length of a word that is never broken, in characters. A longer word, for example a task's id, continues in
the next line."""


def snippet(value: Any, size: int = 160) -> str:
    """A message or JSON value on one line, cut to `size` characters."""
    if isinstance(value, Mapping):
        value = content_text(value.get("content")) or value
    line = " ".join(str(value).split())
    return line if len(line) <= size else line[: size - 1] + "…"


def first_line(text: str | None) -> str:
    """The first line of an error that is not blank."""
    return next(iter((text or "").strip().splitlines()), "no reason recorded")


def answer_line(candidate: Candidate) -> str:
    """An answer on one line: its text and its tool calls."""
    texts = [candidate.text] if candidate.text else []
    for tool_call in candidate.tool_calls:
        function = tool_call.get("function") or {}
        texts.append(f"{function.get('name')}({function.get('arguments', '')})")
    return snippet(" ".join(texts) or "(nothing)")


def scores(rewards: Mapping[str, float | None]) -> Text:
    """Named rewards on one line."""
    line = Text()
    for name, value in sorted(rewards.items()):
        style = ""
        if value is None or value < 0:
            style = BAD
        elif value > 0:
            style = GOOD
        line.append(" " if line else "").append(f"{name} ", style=QUIET)
        line.append("nan" if value is None else f"{value:.3g}", style=style)
    return line


class Grid(Table):
    """A table whose columns never break a word.

    Columns are narrowed down to their longest word. If the terminal is still too narrow, each row becomes a line of
    `name value`. Columns without any value are left out. `below` are texts under a row, by its number: on one line if
    they fit, otherwise each on a separate line.
    """

    below: dict[int, list[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the table without empty columns, or a line for each row if the terminal is too narrow for them."""
        if self.row_count:
            with_values = [column for column in self.columns if any(cell.plain for cell in cells(column.cells))]
            self.columns = [replace(column, _index=index) for index, column in enumerate(with_values)]
        widths = [_width(column, console, options) for column in self.columns]
        room_for_columns = options.max_width - _BETWEEN * (len(widths) - 1)
        if sum(smallest for smallest, _ in widths) > room_for_columns:
            yield from self._lines(options.max_width)
            return
        for column, width in zip(self.columns, _fitted(widths, room_for_columns), strict=True):
            column.width = width
        if not self.below:
            yield from super().__rich_console__(console, options)
            return

        # Rich cannot print lines between the rows of a table. So each row is printed as a table with the same widths.
        for number in range(self.row_count):
            row = copy(self)
            row.columns = [replace(column, _cells=column._cells[number : number + 1]) for column in self.columns]
            row.rows = self.rows[number : number + 1]
            row.title = self.title if number == 0 else None
            row.show_header = number == 0
            yield from Table.__rich_console__(row, console, options)
            yield from self._below(number, options.max_width)

    def _below(self, number: int, width: int) -> Iterable[Text]:
        """The texts under a row: on one line if they fit into the width, otherwise each on a line of its own, cut."""
        texts = self.below.get(number, [])
        if not texts:
            return
        joined = Text("  ").append_text(Text("  ").join(texts))
        lines = [joined] if joined.cell_len <= width else [Text("  ").append_text(text) for text in texts]
        for line in lines:
            line.no_wrap = True
            line.overflow = "ellipsis"
            yield line

    def _lines(self, width: int) -> Iterable[Text]:
        """The table for a narrow terminal: each row as one line of `name value` pairs, without empty cells."""
        if self.title:
            yield Text(f"{self.title}", style="bold")
        for number, row in enumerate(zip(*(column.cells for column in self.columns), strict=True)):
            line = Text()
            for column, cell in zip(self.columns, cells(row), strict=True):
                if not cell.plain:
                    continue
                if line:
                    line.append(" · ", style=QUIET)
                if column.header:
                    line.append(f"{column.header} ", style=QUIET)
                line.append_text(cell)
            yield line
            yield from self._below(number, width)


def grid(*columns: str, title: str = "") -> Grid:
    """A table without inner lines. A column whose name ends with `>` holds numbers. Without any name it has no head."""
    table = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    table.title = title or None
    table.title_justify = "left"
    table.show_header = any(columns)
    table.below = {}
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.endswith(">") else "left"
        table.add_column(name.rstrip(">"), justify=justify, overflow="fold")
    return table


def _width(column: Column, console: Console, options: ConsoleOptions) -> tuple[int, int]:
    """The minimum width of a column, the length of its longest word (at most `_WORD`), and its full width."""
    sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    longest_word = max(size.minimum for size in sizes)
    return min(_WORD, longest_word), max(size.maximum for size in sizes)


def _fitted(widths: Sequence[tuple[int, int]], max_width: int) -> list[int]:
    """The widths of columns that fit into `max_width` together: each has its full width, but the widest are narrowed,
    one character at a time. `widths` has the smallest and the full width of each column.
    """
    fitted = [full for _, full in widths]
    while sum(fitted) > max_width:
        narrowable = [i for i, (smallest, _) in enumerate(widths) if fitted[i] > smallest]
        widest = max(narrowable, key=lambda i: fitted[i])
        fitted[widest] -= 1
    return fitted


def cells(values: Iterable[Any]) -> list[Any]:
    """Table cells: rich texts unchanged, other values without markup; counts with separated thousands."""
    texts = (f"{value:,}" if type(value) is int else value for value in values)
    return [text if isinstance(text, Text) else Text(str(text)) for text in texts]


def definitions(head: str, texts: Mapping[str, str]) -> Grid:
    """Names and their explanations, as a table."""
    table = grid(head, "tells")
    for name, text in texts.items():
        table.add_row(Text(name), Text(text))
    return table


def warn(count: int) -> Text:
    """A count that should be zero."""
    return Text(f"{count:,}", style=BAD if count else QUIET)


def plural(count: int, one: str, many: str | None = None) -> str:
    """`count` with the singular or plural of a noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def sparkline(values: Sequence[float | None]) -> str:
    """A curve on one line, from its lowest to its highest value; a space for a part without values."""
    size = max(1, math.ceil(len(values) / _WIDTH))
    means: list[float | None] = []
    for start in range(0, len(values), size):
        part = [value for value in values[start : start + size] if value is not None]
        means.append(sum(part) / len(part) if part else None)
    numbers = [mean for mean in means if mean is not None]
    low = min(numbers, default=0.0)
    high = max(numbers, default=0.0)
    span = high - low
    top = len(_BARS) - 1
    line = ""
    for mean in means:
        if mean is None:
            line += " "
        elif span:
            line += _BARS[round((mean - low) / span * top)]
        else:
            line += _BARS[top // 2]
    return line


def figure(value: float, percent: bool = False) -> str:
    """A figure with about three significant digits."""
    if percent:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
