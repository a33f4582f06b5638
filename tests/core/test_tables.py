"""Tables: one style, and every cell whole where a table may wrap."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from cotune.tables import Grid, cells, grid, warn

ROOT = Path(__file__).parents[2]


def printed(table: Grid, width: int = 60) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_numbers_stand_right_under_a_head_and_a_title() -> None:
    table = grid("role", "calls>", "why", title="Roles")
    table.add_row("driver", "12", "no scorer")
    table.add_row("navigator", "3", "")
    assert printed(table) == [
        "Roles",
        "role       calls  why",
        "───────────────────────────",
        "driver        12  no scorer",
        "navigator      3",
    ]


def test_counts_have_their_thousands_apart() -> None:
    told = [cell.plain for cell in (*cells(("7800", 7800, 78, 7800.5)), warn(35896))]
    assert told == ["7800", "7,800", "78", "7800.5", "35,896"]


def test_without_names_there_is_no_head() -> None:
    table = grid("", "")
    table.add_row("ok", "python")
    assert printed(table) == ["ok  python"]


def test_columns_get_narrower_down_to_their_longest_word() -> None:
    table = grid("", "success>", "reward>")
    table.add_row("base_as_deployed", "45.5% [36.2, 56.2]", "-0.123 [-0.423, 0.123]")
    assert printed(table, width=40) == [
        "                     success      reward",
        "────────────────────────────────────────",
        "base_as_deployed       45.5%      -0.123",
        "                      [36.2,    [-0.423,",
        "                       56.2]      0.123]",
    ]
    assert printed(table, width=34) == [
        "base_as_deployed · success 45.5%",
        "[36.2, 56.2] · reward -0.123",
        "[-0.423, 0.123]",
    ]


def test_no_table_has_a_style_of_its_own() -> None:
    rooms = ("core", "integrations", "adapters", "trainer")
    made = [
        path
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"\b(Table|Grid)\(", path.read_text())
    ]
    assert made == [ROOT / "core" / "tables.py"]
