"""The one style of all tables and lines that are printed: colours, columns, counts and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

GOOD, BAD, QUIET, NAME = "green", "red", "dim", "cyan"
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24
"""Signs of a curve; where a run has more steps, several share one."""


def snippet(value: Any, size: int = 160) -> str:
    """One line of a message or JSON value."""
    if isinstance(value, Mapping):
        value = value.get("content") or value
    line = " ".join(str(value).split())
    return line if len(line) <= size else line[: size - 1] + "…"


def scores(rewards: Mapping[str, float]) -> Text:
    """Named rewards on one line."""
    line = Text()
    for name, value in sorted(rewards.items()):
        style = GOOD if value is not None and value > 0 else BAD if value is None or value < 0 else ""
        line.append(" " if line else "").append(f"{name} ", style=QUIET)
        line.append("nan" if value is None else f"{value:.3g}", style=style)
    return line


def grid(*columns: str, title: str = "", wrap: bool = False) -> Table:
    """A table without lines inside; a name that ends in `>` is a column of numbers.

    Without any name it has no head. Cells of the last column go on in the next line, and with `wrap` those of all.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    table.title, table.title_justify, table.show_header = title or None, "left", any(columns)
    for place, name in enumerate(columns, 1):
        justify: Literal["left", "right"] = "right" if name.endswith(">") else "left"
        one_line = not wrap and place < len(columns)
        table.add_column(
            name.rstrip(">"), justify=justify, no_wrap=one_line, overflow="ellipsis" if one_line else "fold"
        )
    return table


def cells(values: Iterable[Any]) -> list[Any]:
    """Table cells: rich texts as they are, the rest without markup."""
    return [value if isinstance(value, Text) else Text(str(value)) for value in values]


def warn(count: int) -> Text:
    """A count that should be zero."""
    return Text(str(count), style=BAD if count else QUIET)


def plural(count: int, one: str, many: str | None = None) -> str:
    """`count` with the right form of a noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def sparkline(values: Sequence[float | None]) -> str:
    """A curve on one line, from its lowest to its highest value; a blank where there is none."""
    size = max(1, -(-len(values) // _WIDTH))
    parts = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    means = [sum(part) / len(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high - low
    top = len(_BARS) - 1
    return "".join(
        " " if mean is None else _BARS[round((mean - low) / span * top) if span else top // 2] for mean in means
    )


def figure(value: float, percent: bool = False) -> str:
    """A figure with about three digits that matter."""
    return f"{value:.1%}" if percent else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
