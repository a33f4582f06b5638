"""The training loop of every run, whether it learns from rollouts or from records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cotune.algorithms.samples import TrainRow
from cotune.storage.metrics_file import StepMetrics
from cotune.trainer.guard import roll_back, safe_checkpoint
from cotune.trainer.reporting.metrics import Updates
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.run.checkpoint import commit_checkpoint
from cotune.trainer.run.run import Run
from cotune.trainer.updates import update

Rows = Mapping[str, Sequence[TrainRow]]
"""By policy; policies without rows are not in it."""


class Source(Protocol):
    """Where the batches of a run come from, and what is measured of its steps."""

    @property
    def report(self) -> StepReport:
        """The phases and lines of its steps."""

    def steps(self) -> AbstractAsyncContextManager[None]:
        """Around all steps of this process; there is a checkpoint before."""

    def step(self) -> AbstractAsyncContextManager[None]:
        """Around each step."""

    async def rows(self) -> Rows | None:
        """The rows of the next step; None where the run was stopped meanwhile."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Around the updates of a step."""

    async def publish(self, rows: Rows, updates: Updates) -> None:
        """Give every policy that has moved its next version."""

    async def measure(self, rows: Rows, updates: Updates) -> StepMetrics:
        """Evaluate where that is due, and gather the figures of the step."""

    def complete(self) -> bool:
        """Go on to the next step, when its line is written; whether a checkpoint is due at once."""


async def make_steps(run: Run, source: Source) -> None:
    """Train from the run's next step to its last, or until it has ended or is stopped."""
    report = source.report
    with report.phase("checkpoint"):
        await commit(run)
    async with source.steps():
        while not (run.finished or run.stopping):
            async with source.step():
                rows = await source.rows()
                if rows is None:
                    break  # stopped
                async with source.updating():
                    with report.phase("update", ", ".join(rows)):
                        updates = await update(run, rows)
                await source.publish(rows, updates)
                metrics = await source.measure(rows, updates)
                report.write(metrics)
                run.state.metrics = metrics.roles
                due = source.complete()
                with report.phase("checkpoint"):
                    await commit(run, due=due)
    await commit(run, due=True)
    roll_back(run)


async def commit(run: Run, *, due: bool = False) -> None:
    """Write a checkpoint where one is due: every `checkpoint_every` steps, after the last one, and before new roles get
    their policies."""
    state, config = run.state, run.config
    due = due or bool(state.new_roles) or state.steps % config.checkpoint_every == 0 or state.steps == config.steps
    if state.steps == run.committed or not due:
        return
    spare = {name for name in [safe_checkpoint(run)] if name}
    best = run.best if config.evaluation.keep_best else None
    keep = config.keep_checkpoints
    await asyncio.to_thread(commit_checkpoint, run.folder, state, run.learner, keep=keep, spare=spare, best=best)
    run.committed = state.steps
