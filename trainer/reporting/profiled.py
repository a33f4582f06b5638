"""Profiles the step of a run that `--profile` names."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from cotune.integrations.profiling.spans import Span, traced
from cotune.integrations.profiling.step import print_profile, write_profile
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.run.run import RolloutRun


@contextlib.asynccontextmanager
async def profiled(run: RolloutRun, report: StepReport) -> AsyncIterator[None]:
    """The body is a step of the run: where the configuration names it, its profile is written and shown."""
    sampler: Any = run.sampler  # one of a user's own may have no begin_trace
    number, learner = run.state.steps + 1, run.learner
    if number != run.config.profile:
        yield
        return
    report.progress.say(f"step {number} is profiled ...")
    await asyncio.to_thread(learner.begin_trace)
    failed = await traced("the sampler", lambda: sampler.begin_trace())
    report.phases, run.runner.scoring = [], []
    began = time.time()
    try:
        yield
        whole = Span(f"step {number}", began, time.time())
        traces = await asyncio.to_thread(learner.end_trace)
        traces += failed or await traced("the sampler", lambda: sampler.end_trace())
        if run.state.steps < number:
            return  # stopped
        recorded = await asyncio.to_thread(lambda: [*_recorded(run, number - 1)])
        parts = [*(Span("scorers", *times) for times in run.runner.scoring), *recorded]
        folder, notes = run.folder.profiles, _notes(run)
        profile = await asyncio.to_thread(write_profile, folder, number, whole, report.phases, parts, traces, notes)
        print_profile(report.progress.console, profile)
    finally:
        report.phases = run.runner.scoring = None


def _recorded(run: RolloutRun, step: int) -> Iterator[Span]:
    """Episodes of the step, as spans of the application, and their calls."""
    for episode in run.store.episodes(training_step=step):
        yield Span("application", episode.started, episode.started + episode.latency)
        for *_, began, seconds, _ in run.store.call_times(episode.id):
            yield Span("answering", began, began + seconds)


def _notes(run: RolloutRun) -> Iterator[str]:
    if run.config.cluster.address and run.config.cluster.learners > 1:
        yield "forward, backward, optimizer: of each pool's first learner"
    if run.config.ahead:
        yield "mode async: later steps are rolled out meanwhile, which shares sampler and cores with every phase"
