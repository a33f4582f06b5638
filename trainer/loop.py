"""The training loop of every run, whether it learns from rollouts or from records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from cotune.algorithms.samples import TrainRow
from cotune.errors import RunError
from cotune.storage.metrics_file import StepMetrics
from cotune.storage.run_layout import read_run
from cotune.storage.whole_file import is_full
from cotune.trainer.guard import safe_checkpoint
from cotune.trainer.reporting.metrics import Updates
from cotune.trainer.reporting.profile import profiled
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.run.checkpoint import save_checkpoint
from cotune.trainer.run.run import Run
from cotune.trainer.schedules.schedule import lr_scale
from cotune.trainer.updates import update_policies

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
        return nullcontext()

    async def rows(self) -> Rows | None:
        """The rows of the next step; None where the run was stopped meanwhile."""

    def updating(self, rows: Rows) -> AbstractAsyncContextManager[None]:
        """Around the updates of a step on these rows."""
        return nullcontext()

    async def publish(self, rows: Rows, updates: Updates) -> None:
        """Give every policy that has moved its next version."""

    async def measure(self, rows: Rows, updates: Updates) -> StepMetrics:
        """Evaluate where that is due, and gather the figures of the step."""

    def complete(self) -> bool:
        """Go on to the next step, when its line is written; whether a checkpoint is due at once."""


async def make_steps(run: Run, source: Source) -> None:
    """Train from the run's next step to its last, or until it has ended or is stopped."""
    report, config = source.report, run.config
    with report.phase("checkpoint"):
        await commit(run)
    async with source.steps():
        while not (run.finished or run.stopping):
            async with source.step(), profiled(run, report.progress):
                rows = await source.rows()
                if rows is None:
                    break  # stopped
                async with source.updating(rows):
                    with report.phase("update", ", ".join(rows)):
                        scales = {
                            name: lr_scale(config.settings_of(name).schedule, run.state.steps, config.steps)
                            for name in rows
                        }
                        updates = await update_policies(run.learner, rows, scales)
                await source.publish(rows, updates)
                metrics = await source.measure(rows, updates)
                report.write(metrics)
                run.state.metrics = metrics.roles
                due = source.complete()
                with report.phase("checkpoint"):
                    await commit(run, due=due)
    await commit(run, due=True)


async def commit(run: Run, *, due: bool = False) -> None:
    """Write a checkpoint where one is due: every `checkpoint_every` steps, after the last one, and before new roles get
    their policies."""
    state, config = run.state, run.config
    due = due or bool(state.new_roles) or state.steps % config.checkpoint_every == 0 or state.steps == config.steps
    if state.steps == run.committed or not due:
        return
    described = read_run(run.folder.path)
    state.run, state.prompts = described.id, described.prompts
    spare = {name for name in [safe_checkpoint(run, state.steps)] if name}
    best = run.best if config.evaluation.keep_best else None
    try:
        await asyncio.to_thread(
            save_checkpoint,
            run.folder.checkpoints,
            state,
            run.learner,
            spare=spare,
            best=best,
        )
    except OSError as error:
        first = "Free some space" if is_full(error) else "Put that right"
        cause = f"The checkpoint after {state.steps} steps cannot be written: {error}."
        raise RunError(cause, f"{first}, then {run.folder.way_on}") from error
    run.committed = state.steps
