"""Count the calls that were sent with edited prompts, and the calls of the same roles that were sent unedited."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from cotune.recording.recorder import Sink
from cotune.records.structs import CallRecord, Record
from cotune.tables import plural

WHY = {
    "prompt_unmatched": "sent unedited, without the texts that the prompts edit",
    "prompt_ambiguous": "sent unedited, as their texts fit the prompts in several ways",
}
"""Explanations by kind of warning."""


class PromptUse:
    """A sink that counts calls whose role has edited prompts, and passes all records to another sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self.roles: dict[str, Counter[str]] = {}
        """Counts by role: all calls under `calls`, and the calls that were sent unedited under their reasons."""

    def write(self, records: Sequence[Record]) -> None:
        """Count the calls among the records, and pass all records on."""
        for call in records:
            if isinstance(call, CallRecord) and call.prompts:
                with self._lock:
                    counts = self.roles.setdefault(call.role, Counter())
                    counts["calls"] += 1
                    if call.unedited:  # the reason why the call was sent unedited
                        counts[call.unedited] += 1
        self._sink.write(records)

    def lines(self) -> list[str]:
        """A line of text for each role: how many calls had edited prompts, and why the others had not."""
        lines = []
        for role, counts in sorted(self.roles.items()):
            unedited = 0
            reasons: list[str] = []
            for kind, reason in WHY.items():
                if counts[kind]:
                    unedited += counts[kind]
                    reasons.append(f"{counts[kind]} {reason} ({kind})")
            text = f"edited prompts of {role}: {counts['calls'] - unedited} of {plural(counts['calls'], 'call')}"
            lines.append("; ".join([text, *reasons]))
        return lines
