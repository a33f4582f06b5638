"""The counts of a collector, in the text form that Prometheus reads."""

from __future__ import annotations

import threading
from collections import defaultdict

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


class Counts:
    """Counters by name and labels; safe from any thread."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        with self._lock:
            self._values[name, key] += value

    def total(self, name: str) -> float:
        """A counter over all of its labels."""
        with self._lock:
            return sum(value for (found, _), value in self._values.items() if found == name)

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """All counters, and gauges by name with their text and value."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, about in _KINDS.items():
            lines += [f"# HELP cotune_collect_{name}_total {about}", f"# TYPE cotune_collect_{name}_total counter"]
            for (found, labels), value in sorted(values.items()):
                if found == name:
                    lines.append(f"cotune_collect_{name}_total{f'{{{labels}}}' if labels else ''} {value:g}")
        for name, (about, value) in gauges.items():
            lines += [f"# HELP cotune_collect_{name} {about}", f"# TYPE cotune_collect_{name} gauge"]
            lines.append(f"cotune_collect_{name} {value:g}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
