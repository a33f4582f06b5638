"""The counts of a collector, in the text form that Prometheus reads."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping

_KINDS = {
    "requests": "Requests by path and status.",
    "records": "Records that were stored, by application and kind.",
    "refused_records": "Records that were not stored, by reason.",
    "left_out_spans": "Spans of OTLP requests that could not be mapped, by reason.",
    "source_dropped_records": "Records that applications dropped, as their spools were full or damaged.",
    "source_sampled_calls": "Calls that sampling rates left out.",
    "bytes": "Bytes of bodies, as they came and unpacked.",
    "commit_seconds": "Seconds in commits, all together.",
    "commits": "Commits by outcome.",
}


MOST_LABELS = 1000
"""Sets of labels of one counter. Clients choose some of them, such as names of applications, and each takes memory."""


class Counts:
    """Counters by name and labels; safe from any thread. Beyond MOST_LABELS, a counter has the label "other"."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._label_sets: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add `value` to the counter `name` with these labels. If the counter has too many sets of labels, a new set
        counts as "other".
        """
        label_text = _label_text(labels)
        with self._lock:
            if (name, label_text) in self._values:
                self._values[name, label_text] += value
            elif self._label_sets[name] < MOST_LABELS:
                self._label_sets[name] += 1
                self._values[name, label_text] = value
            else:
                self._values[name, _label_text(dict.fromkeys(labels, "other"))] += value

    def total(self, name: str) -> float:
        """A counter over all of its labels."""
        with self._lock:
            return sum(value for (counter, _), value in self._values.items() if counter == name)

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """All counters and the `gauges` in the text format of Prometheus. A gauge has a description and a value."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for counter, description in _KINDS.items():
            name = f"cotune_collect_{counter}_total"
            lines += [f"# HELP {name} {description}", f"# TYPE {name} counter"]
            for (counter_of_value, labels), value in sorted(values.items()):
                if counter_of_value == counter:
                    label_part = f"{{{labels}}}" if labels else ""
                    lines.append(f"{name}{label_part} {value:g}")
        for gauge, (description, value) in gauges.items():
            name = f"cotune_collect_{gauge}"
            lines += [f"# HELP {name} {description}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"


def _label_text(labels: Mapping[str, str]) -> str:
    parts = []
    for label, text in labels.items():
        escaped = text[:100].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        parts.append(f'{label}="{escaped}"')
    return ",".join(parts)
