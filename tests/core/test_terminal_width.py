"""How wide what is printed is: as the terminal on one, wide in a pipe."""

from __future__ import annotations

import io

import pytest

from cotune.tables import grid
from cotune.terminal import terminal


@pytest.mark.parametrize(("columns", "table"), [(None, True), ("40", False)])
def test_tables_stay_tables_in_a_pipe(monkeypatch: pytest.MonkeyPatch, columns: str | None, table: bool) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    wide = grid(*(f"column_{number}_of_ten" for number in range(8)))
    wide.add_row(*(f"value_{number}" for number in range(8)))
    out = io.StringIO()
    terminal(file=out).print(wide)
    assert ("\n" in out.getvalue().strip() and "·" not in out.getvalue()) == table
    assert "\x1b" not in out.getvalue()


def test_columns_without_any_value_are_left_out() -> None:
    table = grid("role", "tools", "calls>")
    table.add_row("writer", "", "3")
    table.add_row("critic", "", "12")
    out = io.StringIO()
    terminal(file=out, width=80).print(table)
    assert [line.split() for line in out.getvalue().splitlines()][::2] == [["role", "calls"], ["writer", "3"]]


def test_lines_in_a_pipe_end_with_their_text() -> None:
    out = io.StringIO()
    table = grid("role", "text")
    for row in (("a", "short"), ("b", "much longer than the other")):
        table.add_row(*row)
    terminal(file=out).print(table)
    lines = out.getvalue().splitlines()
    assert "a     short" in lines and all(line == line.rstrip() for line in lines)
