"""Why episodes failed: errors that differ in their numbers alone are one cause, with a count and an example."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from cotune.tables import first_line

FAILED = """
    SELECT phase, CASE WHEN json_valid(body) THEN json_extract(body, '$.error') END AS cause, count(*) AS times
    FROM episodes WHERE status = 'error' GROUP BY 1, 2 ORDER BY times DESC, cause"""
"""Rows of `causes`, of the table of episodes."""
_NUMBER = re.compile(
    r"0x[0-9a-f]+"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"  # UUID
    r"|\b(?=[a-z]*\d)[0-9a-hjkmnp-tv-z]{26}\b"  # ULID
    r"|\b(?=[a-f]*\d)[0-9a-f]{12,}\b"
    r"|\d+(?:[.,]\d+)*(?:e[-+]?\d+)?",
    re.IGNORECASE,
)


class Cause(msgspec.Struct, kw_only=True):
    """Why `count` episodes of a phase failed. `example` is the commonest of `forms` errors whose first lines differ in
    numbers alone."""

    phase: str
    example: str
    count: int
    forms: int

    @property
    def line(self) -> str:
        """The first line of the example, whole."""
        return first_line(self.example)

    @property
    def rest(self) -> str:
        """What the example says after its first line."""
        return self.example.strip()[len(self.line) :].strip()


def causes(rows: Iterable[tuple[str, str | None, int]]) -> list[Cause]:
    """Causes of failed episodes, the commonest first, from (phase, error, episodes), the commonest first."""
    found: dict[tuple[str, str], Cause] = {}
    lines: dict[tuple[str, str], set[str]] = {}
    for phase, error, count in rows:
        line = first_line(error)
        key = (str(phase), _NUMBER.sub("#", line))
        cause = found.setdefault(key, Cause(phase=key[0], example=error or line, count=0, forms=0))
        cause.count += count
        lines.setdefault(key, set()).add(line)
    for key, cause in found.items():
        cause.forms = len(lines[key])
    return sorted(found.values(), key=lambda cause: -cause.count)
