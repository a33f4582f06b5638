"""How many calls went out with edited prompts, and which did not though their role has some."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from cotune.recording.recorder import Sink
from cotune.records.structs import CallRecord, Record
from cotune.tables import plural

WHY = {
    "prompt_unmatched": "went out as asked, without the texts that the prompts edit",
    "prompt_ambiguous": "went out as asked, as a text can be read in several ways",
}
"""By kind of warning."""


class PromptUse:
    """A sink that counts calls whose role has edited prompts, and hands all records on to another."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self.roles: dict[str, Counter[str]] = {}
        """By role its calls under `calls`, and those that went out as they were asked by the reason."""

    def write(self, records: Sequence[Record]) -> None:
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
            edited = counts["calls"] - sum(counts[why] for why in WHY)
            text = f"edited prompts of {role}: {edited} of {plural(counts['calls'], 'call')}"
            left = [f"{counts[why]} {said} ({why})" for why, said in WHY.items() if counts[why]]
            lines.append("; ".join([text, *left]))
        return lines
