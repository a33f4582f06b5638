"""How many calls of recorded episodes went out with edited prompts, and which did not though their role has some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cotune.storage.protocol import Store
from cotune.tables import plural

WHY = {
    "prompt_unmatched": "went out as asked: without the texts that the prompts edit",
    "prompt_ambiguous": "went out as asked: a text can be read in several ways",
}
"""By kind of warning."""


def prompt_use(store: Store, episodes: Iterable[str]) -> dict[str, Counter[str]]:
    """By role that prompts edit: its calls under `calls`, those that went out as they were asked by the reason."""
    found: dict[str, Counter[str]] = {}
    for episode in episodes:
        for call in store.calls(episode):
            if call.prompts:
                counts = found.setdefault(call.role, Counter())
                counts["calls"] += 1
                if call.unedited:
                    counts[call.unedited] += 1
    return dict(sorted(found.items()))


def use_lines(found: dict[str, Counter[str]]) -> list[str]:
    """A line for each role, for people."""
    lines = []
    for role, counts in found.items():
        left = sum(counts[why] for why in WHY)
        text = f"edited prompts of {role}: {counts['calls'] - left} of {plural(counts['calls'], 'call')}"
        lines.append("; ".join([text, *(f"{counts[why]} {said} ({why})" for why, said in WHY.items() if counts[why])]))
    return lines


def prompt_lines(store: Store, episodes: Iterable[str]) -> list[str]:
    """The lines on episodes that a store has."""
    return use_lines(prompt_use(store, episodes))
