"""Why episodes failed. Errors that differ only in their numbers count as one cause, with a count and an example."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from cotune.tables import first_line, plural

_NUMBER = re.compile(
    r"0x[0-9a-f]+"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"  # UUID
    r"|\b(?=[a-z]*\d)[0-9a-hjkmnp-tv-z]{26}\b"  # ULID
    r"|\b(?=[a-f]*\d)[0-9a-f]{12,}\b"
    r"|\d+(?:[.,]\d+)*(?:e[-+]?\d+)?",
    re.IGNORECASE,
)


class Cause(msgspec.Struct, kw_only=True):
    """The reason why `count` episodes of a phase failed. `example` is the commonest of `forms` errors whose first lines
    differ only in numbers."""

    phase: str
    example: str
    count: int
    forms: int

    @property
    def line(self) -> str:
        """The first line of the example, whole."""
        return first_line(self.example)

    @property
    def text(self) -> str:
        """The text after a number of episodes: `of train failed: ValueError: ...`."""
        forms = f" (the commonest of {self.forms} forms that differ in numbers)" if self.forms > 1 else ""
        return f"of {self.phase} failed: {self.line}{forms}"

    @property
    def rest(self) -> str:
        """The example without its first line."""
        return self.example.strip()[len(self.line) :].strip()


def causes(rows: Iterable[tuple[str, str | None, int]]) -> list[Cause]:
    """Causes of failed episodes, the commonest first. Errors that differ only in numbers have one cause.

    `rows` are (phase, error, number of episodes with this error), the commonest first.
    """
    by_key: dict[tuple[str, str], Cause] = {}
    lines_of_key: dict[tuple[str, str], set[str]] = {}
    for phase, error, episodes in rows:
        line = first_line(error)
        line_without_numbers = _NUMBER.sub("#", line)
        key = (str(phase), line_without_numbers)
        cause = by_key.setdefault(key, Cause(phase=str(phase), example=error or line, count=0, forms=0))
        cause.count += episodes
        lines_of_key.setdefault(key, set()).add(line)
    for key, cause in by_key.items():
        cause.forms = len(lines_of_key[key])
    return sorted(by_key.values(), key=lambda cause: -cause.count)


def shorten_causes(by_count: Sequence[Cause], most: int) -> tuple[Sequence[Cause], str]:
    """The `most` common causes, and a sentence with the number of other failed episodes; empty without others."""
    others = by_count[most:]
    if not others:
        return by_count, ""
    count = plural(sum(cause.count for cause in others), "more episode")
    return by_count[:most], f"{count} failed, for {plural(len(others), 'other reason')}"
