"""The profile of one step: written to the run folder, read again, printed."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from cotune.errors import RunError
from cotune.integrations.profiling.spans import ProfileRow, Span, Trace, breakdown
from cotune.storage.checkpoints import checkpoint_name
from cotune.storage.run_layout import RunLayout
from cotune.storage.typed_json import read_typed
from cotune.storage.whole_file import whole_file
from cotune.tables import QUIET, cells, grid

MOST_SPANS = 50_000
"""Most spans of a trace; the table counts all."""


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A step (numbered from 1) that took so many seconds, which `rows` add up to."""

    step: int
    seconds: float
    rows: tuple[ProfileRow, ...]
    notes: tuple[str, ...] = ()
    """What could not be measured."""
    trace: str = ""
    """File with the spans and operators, for https://ui.perfetto.dev."""


def write_profile(
    folder: Path,
    step: int,
    whole: Span,
    phases: Sequence[Span],
    parts: Sequence[Span],
    traces: Sequence[Trace],
    notes: Iterable[str],
) -> StepProfile:
    """Write table and trace of a step into `folder`. `parts` are spans beside those of `traces`."""
    parts = [*(span for trace in traces for span in trace.spans), *parts]
    left_out = sum(trace.left_out for trace in traces) + max(0, len(parts) - MOST_SPANS)
    lacking = [f"{left_out} events were too many for the trace; the table counts all"] if left_out else []
    folder.mkdir(exist_ok=True)
    profile = StepProfile(
        step=step,
        seconds=whole.ended - whole.began,
        rows=breakdown(whole, phases, parts),
        notes=tuple(dict.fromkeys([*(note for trace in traces for note in trace.notes), *notes, *lacking])),
        trace=str(folder / f"{checkpoint_name(step)}.trace.json.gz"),
    )
    with gzip.open(profile.trace, "wt") as trace_file:
        events = _events([whole, *phases], parts[:MOST_SPANS], traces)
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, trace_file)
    with whole_file(folder / f"{checkpoint_name(step)}.json") as file:
        file.write(msgspec.json.encode(profile))
    return profile


def read_profiles(path: str | Path) -> list[StepProfile]:
    """The profiles of a run's steps. Raises RunError for a run without one."""
    files = sorted(RunLayout(path).profiles.glob("step-*[0-9].json"))
    if not files:
        raise RunError(f"No step of {path} was profiled.", "Profile one: cotune train ... --profile STEP.")
    return [read_typed(file, StepProfile, "Profile another step.") for file in files]


def print_profile(console: Console, profile: StepProfile) -> None:
    """A profiled step as a table, what it lacks, and where its trace is, in one line to copy."""
    table = grid("phase", "part", "seconds>", "of the step>", "at work>", title=f"step {profile.step}")
    shown = ""
    for row in profile.rows:
        share = row.seconds / profile.seconds if profile.seconds else 0.0
        name, shown = "" if row.phase == shown else row.phase, row.phase
        busy = f"{row.busy:.2f}" if row.busy - row.seconds >= 0.005 else ""
        table.add_row(*cells((name, row.part, f"{row.seconds:.2f}", f"{share:.1%}", busy)))
    table.add_row(*cells(("all", "", f"{profile.seconds:.2f}", "100.0%", "")))
    console.print(table, *(Text(note, style=QUIET) for note in profile.notes), sep="\n")
    if profile.trace:
        console.print(Text(f"trace, to open at https://ui.perfetto.dev: {profile.trace}"), soft_wrap=True)


def _events(phases: Sequence[Span], parts: Sequence[Span], traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Spans and operators in Chrome's trace format, in microseconds from the first one."""
    here = os.getpid()
    events: list[dict[str, Any]] = [event for trace in traces for event in trace.operators]
    for span in (*(msgspec.structs.replace(phase, process=here, thread=1) for phase in phases), *parts):
        about = {"name": span.name, "cat": "cotune", "ts": span.began * 1e6}
        if span.process:
            lasts = (span.ended - span.began) * 1e6
            events.append({"ph": "X", "pid": span.process, "tid": span.thread, "dur": lasts, **about})
        else:  # spans of no process may overlap
            about |= {"cat": span.name, "id": len(events), "pid": here, "tid": 2}
            events += [{"ph": "b", **about}, {"ph": "e", **about, "ts": span.ended * 1e6}]
    first = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - first, 3)
    names = {here: "cotune train"}
    for span in (trace.spans[0] for trace in traces if trace.spans):
        names.setdefault(span.process, "learner" if span.name in ("forward", "backward") else "sampler")
    naming = {"ph": "M", "name": "process_name"}
    events += [{**naming, "pid": process, "args": {"name": name}} for process, name in names.items()]
    return [*events, {"ph": "M", "name": "thread_name", "pid": here, "tid": 1, "args": {"name": "phases"}}]
