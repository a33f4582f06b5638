"""Tables: one style, and every cell whole where a table may wrap."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cotune.tables import grid

ROOT = Path(__file__).parents[2]


def printed(table: Table, width: int = 60) -> list[str]:
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


def test_without_names_there_is_no_head() -> None:
    table = grid("", "")
    table.add_row("ok", "python")
    assert printed(table) == ["ok  python"]


def test_a_cell_that_has_no_room_goes_on_in_the_next_line() -> None:
    table = grid("", "success>", "reward>", wrap=True)
    table.add_row("base_as_deployed", "45.5% [36.2, 56.2]", "-0.123 [-0.423, 0.123]")
    assert printed(table, width=40) == [
        "                   success        reward",
        "────────────────────────────────────────",
        "base_as_depl  45.5% [36.2,        -0.123",
        "oyed                 56.2]      [-0.423,",
        "                                  0.123]",
    ]


def test_no_table_has_a_style_of_its_own() -> None:
    rooms = ("core", "integrations", "adapters", "trainer")
    made = [path for room in rooms for path in (ROOT / room).rglob("*.py") if " Table(" in path.read_text()]
    assert made == [ROOT / "core" / "tables.py"]
