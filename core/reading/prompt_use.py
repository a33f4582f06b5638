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
                    counts.update(["calls", *filter(None, [call.unedited])])
        self._sink.write(records)

    def lines(self) -> list[str]:
        """A line for each role, for people."""
        lines = []
        for role, counts in sorted(self.roles.items()):
            edited = counts["calls"] - sum(counts[kind] for kind in WHY)
            text = f"edited prompts of {role}: {edited} of {plural(counts['calls'], 'call')}"
            unedited = [f"{counts[kind]} {reason} ({kind})" for kind, reason in WHY.items() if counts[kind]]
            lines.append("; ".join([text, *unedited]))
        return lines
