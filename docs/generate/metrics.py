"""What a run counts, from the code that counts it."""

from __future__ import annotations

from wording import prose

from cotune.algorithms.filters import REASONS
from cotune.reading.metrics import registry


def reasons() -> str:
    """Each reason to leave a candidate out, and what it says."""
    return "\n".join(f"- `{reason}`: {prose(why)}" for reason, why in REASONS.items())


def figures(of: str) -> str:
    """The figures of one table of the registry, with their formula and bad sign."""
    found = {name: metric for group in registry().values() for name, metric in group.items() if metric.of == of}
    rows = [f"| `{name}` | {metric.formula} | {metric.sign} |" for name, metric in found.items()]
    return "\n".join(["| figure | formula | bad sign |", "|---|---|---|", *rows])
