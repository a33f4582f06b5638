"""What a run counts, from the code that counts it."""

from __future__ import annotations

from wording import prose

from cotune.algorithms.filters import REASONS


def reasons() -> str:
    """Each reason to leave a candidate out, and what it says."""
    return "\n".join(f"- `{reason}`: {prose(why)}" for reason, why in REASONS.items())
