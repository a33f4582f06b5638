"""The names in a line of metrics.jsonl that `docs/reference/metrics.md`, or the registry it is made from, explains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cotune.algorithms.filters import REASONS
from cotune.reading.metrics import registry

DOCS = Path(__file__).parents[2] / "docs"


def _named(*pages: str) -> set[str]:
    text = "\n".join((DOCS / page).read_text() for page in pages)
    return set(re.findall(r"`\"?([\w./]+)\"?`", text))


FIGURES = _named("reference/metrics.md") | {name for group in registry().values() for name in group}
COUNTERS = FIGURES | _named("internals/sampler.md")
REASONS_NAMED = {*REASONS} | _named("how-to/distillation.md")


def undocumented(line: Mapping[str, Any]) -> list[str]:
    """The names of a step's line that no page explains, as `roles.reward`."""
    return sorted({name for name, known in _names(line) if not known})


def _names(line: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Every name in a line, with whether it is explained. Names that the user gives are not asked for."""
    for name in line:
        yield name, name in FIGURES
    for table in ("roles", "policies"):
        for figures in line[table].values():
            for name in figures:
                yield f"{table}.{name}", name.rpartition("/")[2] in FIGURES
    for table in ("seconds", "refill", "replay", "held_out"):
        for name in line[table]:
            yield f"{table}.{name}", name in FIGURES or "/" in name
    for reason in line["left_out"]:
        yield f"left_out.{reason}", reason in REASONS_NAMED
    for name in line["counters"]:
        yield f"counters.{name}", name.rpartition(".")[2] in COUNTERS
