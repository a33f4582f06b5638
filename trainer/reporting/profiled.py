"""Profiling one step of a run: who did what when is gathered from all its parts, added up, and written."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import CotuneError
from cotune.integrations.models.engine_sampler import CalledSampler
from cotune.sampling.protocol import Sampler
from cotune.step_profile import Span, StepProfile, Trace, breakdown, print_profile
from cotune.storage.checkpoints import checkpoint_name
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.run.run import Run
from cotune.trainer.run.run_folder import write_atomically

MOST_SPANS = 50_000
"""Spans that a trace holds, at most; the table is of all."""


@contextlib.asynccontextmanager
async def profiled(run: Run, report: StepReport) -> AsyncIterator[None]:
    """What is inside is a step of the run: where its configuration names it, its profile is written and shown."""
    number = run.state.steps + 1
    if number != run.config.profile:
        yield
        return
    report.progress.say(f"step {number} is profiled ...")
    await asyncio.to_thread(run.learner.begin_trace)
    sampler = await _begun(run.sampler)
    report.phases, run.runner.scoring = [], []
    began = time.time()
    try:
        yield
        whole = Span(f"step {number}", began, time.time())
        traces = await asyncio.to_thread(run.learner.end_trace)
        traces += await _ended(sampler)
        if run.state.steps < number:
            return  # stopped
        profile = await asyncio.to_thread(_write, run, whole, report.phases, traces)
        print_profile(report.progress.console, profile)
    finally:
        report.phases = run.runner.scoring = None


async def _begun(sampler: Sampler) -> CalledSampler | str:
    """The sampler, which notes from now on what it does; or why it does not."""
    if not isinstance(sampler, CalledSampler):
        return f"{type(sampler).__name__} has no begin_trace"
    try:
        await sampler.begin_trace()
    except CotuneError as error:
        return error.cause
    return sampler


async def _ended(sampler: CalledSampler | str) -> list[Trace]:
    """What a sampler has done. One that cannot say so stops no run: that is a note."""
    try:
        if isinstance(sampler, CalledSampler):
            return await sampler.end_trace()
    except CotuneError as error:
        sampler = error.cause
    return [Trace([], [], 0, (f"not traced: the sampler: {sampler}",))]


def _write(run: Run, whole: Span, phases: Sequence[Span], traces: Sequence[Trace]) -> StepProfile:
    """The profile of a step that is done, in the run folder."""
    step = run.state.steps
    scoring = [Span("scorers", *times) for times in run.runner.scoring or ()]
    episodes, calls = _recorded(run, step - 1)
    parts = [span for trace in traces for span in trace.spans] + [*scoring, *calls, *episodes]
    folder = run.folder.profiles
    folder.mkdir(exist_ok=True)
    trace = folder / f"{checkpoint_name(step)}.trace.json.gz"
    left_out = _write_trace(trace, [whole, *phases], parts, traces)
    notes = dict.fromkeys(note for found in traces for note in found.notes)
    profile = StepProfile(
        step=step,
        seconds=whole.ended - whole.began,
        rows=breakdown(whole, phases, parts),
        notes=(*notes, *_notes(run, left_out)),
        trace=str(trace),
    )
    write_atomically(folder / f"{checkpoint_name(step)}.json", msgspec.json.encode(profile))
    return profile


def _recorded(run: Run, step: int) -> tuple[list[Span], list[Span]]:
    """Episodes of the step, as spans of the application, and their calls."""
    episodes, calls = [], []
    for episode in run.store.episodes(training_step=step):
        if episode.status == "abandoned":
            continue
        episodes.append(Span("application", episode.started, episode.started + episode.latency))
        for call in run.store.calls(episode.id):
            calls.append(Span("answering", call.started, call.started + call.latency))
    return episodes, calls


def _notes(run: Run, left_out: int) -> Iterable[str]:
    if run.config.cluster.address and run.config.cluster.learners > 1:
        yield "forward, backward, optimizer: of each pool's first learner"
    if run.config.ahead:
        yield "mode async: later steps are rolled out meanwhile, which shares sampler and cores with every phase"
    if left_out:
        yield f"{left_out} events were too many for the trace; the table is of all"


def _write_trace(file: Path, phases: Sequence[Span], parts: Sequence[Span], traces: Sequence[Trace]) -> int:
    """Spans and operators in Chrome's trace format; returns how many were left out."""
    events: list[dict[str, Any]] = [event for trace in traces for event in trace.operators]
    events += [_event(span, process=os.getpid(), thread=1) for span in phases]
    events += [_event(span) for span in parts[:MOST_SPANS] if span.process]
    for number, span in enumerate(span for span in parts[:MOST_SPANS] if not span.process):
        about = {"name": span.name, "cat": span.name, "id": number, "pid": os.getpid(), "tid": 2}
        events += [{"ph": "b", "ts": span.began * 1e6, **about}, {"ph": "e", "ts": span.ended * 1e6, **about}]
    names = {os.getpid(): "cotune train"}
    for trace in traces:
        for span in trace.spans[:1]:
            names.setdefault(span.process, "learner" if span.name in ("forward", "backward") else "sampler")
    for process, name in names.items():
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
    events.append({"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": 1, "args": {"name": "phases"}})
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    with gzip.open(file, "wt") as out:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, out)
    return sum(trace.left_out for trace in traces) + max(0, len(parts) - MOST_SPANS)


def _event(span: Span, *, process: int = 0, thread: int = 0) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "cotune",
        "pid": process or span.process,
        "tid": thread or span.thread,
        "ts": span.began * 1e6,
        "dur": (span.ended - span.began) * 1e6,
    }
