"""Records as the source of a run's batches: the rows of some recorded episodes a step, until held-out losses cease to
fall."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from cotune.adapters.export import read_weights
from cotune.algorithms.samples import TrainRow
from cotune.storage.metrics_file import StepMetrics
from cotune.trainer.from_records.run import RecordsRun
from cotune.trainer.loop import Rows, Source
from cotune.trainer.reporting.metrics import Updates, moved, step_seconds, throughput
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.run.checkpoint import BestLoss
from cotune.trainer.run.run_folder import write_atomically
from cotune.trainer.schedules.schedule import lr_scale

BEST = "best"
"""Folder of a run with the weights of each policy at its lowest held-out loss."""


class RecordsSource(Source):
    """The `Source` of a run that learns from records. A policy ends with the weights of its lowest held-out loss."""

    def __init__(self, run: RecordsRun, progress: Progress) -> None:
        self._report = StepReport(run, progress)
        self._run = run
        self._progress = progress
        self._episodes: list[str] = []

    @property
    def report(self) -> StepReport:
        return self._report

    @contextlib.asynccontextmanager
    async def steps(self) -> AsyncIterator[None]:
        """Ends a finished run with its best weights."""
        yield
        run = self._run
        for name, best in run.state.best.items() if run.finished else ():
            text = f"{name}: lowest held-out loss {best.loss:.4f} after step {best.step}; its weights are kept"
            self._progress.say(text)
            if best.since:
                weights = await asyncio.to_thread(read_weights, self._best_file(name))
                await asyncio.to_thread(run.learner.adopt, name, weights)
                run.committed = -1

    async def rows(self) -> Rows:
        """The rows of the step's episodes whose policies still learn."""
        run = self._run
        self._episodes = run.schedule.of(run.state.steps)
        found = run.recorded.of(self._episodes, run.trained)
        return {name: rows for name, rows in found.items() if name in run.learning}

    async def publish(self, rows: Rows, updates: Updates) -> None:
        """Count the versions: nobody samples from them."""
        versions = self._run.state.versions
        versions.update({name: versions.get(name, 0) + 1 for name in moved(updates)})

    async def measure(self, rows: Rows, updates: Updates) -> StepMetrics:
        """Measure held-out losses where that is due."""
        with self.report.phase("held_out"):
            held_out = await self._held_out_losses()
        return _metrics(self._run, self._episodes, rows, updates, held_out, self._progress.activity.seconds)

    def complete(self) -> bool:
        """No checkpoint is due before its time."""
        self._run.state.steps += 1
        return False

    async def _held_out_losses(self) -> dict[str, dict[str, float]]:
        """The held-out loss of each policy that still learns; the lowest so far keeps its weights."""
        run = self._run
        steps = run.state.steps + 1
        if steps % run.config.evaluation.every and steps != run.config.steps:
            return {}
        losses = {}
        for name in run.learning:
            if name not in run.held_out:
                continue
            losses[name] = await asyncio.to_thread(run.learner.loss, name, run.held_out[name])
            best, loss = run.state.best.get(name), losses[name]["loss"]
            if best is not None and not loss < best.loss:
                run.state.best[name] = msgspec.structs.replace(best, since=best.since + 1)
                continue
            run.state.best[name] = BestLoss(loss, steps)
            await asyncio.to_thread(self._keep_best, name)
        return losses

    def _best_file(self, policy: str) -> Path:
        run = self._run
        return run.folder.path / BEST / f"{run.state.policies.trained.index(policy)}.safetensors"

    def _keep_best(self, policy: str) -> None:
        from safetensors.numpy import save

        file = self._best_file(policy)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, save(dict(self._run.learner.weights(policy))))


def _metrics(
    run: RecordsRun,
    episodes: Sequence[str],
    rows: Mapping[str, Sequence[TrainRow]],
    updates: Updates,
    held_out: Mapping[str, Mapping[str, float]],
    seconds: Mapping[str, float],
) -> StepMetrics:
    count = sum(map(len, rows.values()))
    tokens = sum(figures.get("tokens", 0.0) for figures in updates.values())
    after = {name: {f"held_out_{key}": value for key, value in found.items()} for name, found in held_out.items()}
    versions = run.state.versions
    return StepMetrics(
        step=run.state.steps,
        episodes=len(episodes),
        failed=0,
        calls=count,
        candidates=count,
        groups=0,
        rows=count,
        outcome={},
        held_out={},
        roles={role: _of_role(role, name, rows, updates, after) for role, name in run.trained.items() if name in rows},
        policies={
            name: {"version": versions.get(name, 0), **figures, **after.get(name, {})}
            for name, figures in updates.items()
        },
        left_out=dict(run.recorded.left_out) if run.state.steps == 0 else {},
        staleness={},
        counters={},
        lr_scale=lr_scale(run.config.schedule, run.state.steps, run.config.steps),
        seconds=dict(seconds),
        **{**throughput(updates, seconds), "tokens_per_s": tokens / max(step_seconds(seconds), 1e-9)},
        updated=bool(moved(updates)),
        notes=tuple(run.notes) if run.state.steps == 0 else (),
        stayed={name: "no gradient" for name in rows if name not in moved(updates)},
    )


def _of_role(
    role: str,
    policy: str,
    rows: Mapping[str, Sequence[TrainRow]],
    updates: Updates,
    after: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Figures of a role; the losses are those of its policy."""
    own = [row for row in rows[policy] if row.role == role]
    told = {name: updates[policy][name] for name in ("loss", "margin", "accuracy") if name in updates[policy]}
    lengths = [sum(row.loss_mask) if row.loss_mask else len(row.response_ids) for row in own]
    return {"rows": float(len(own)), "tokens_mean": sum(lengths) / max(len(own), 1), **told, **after.get(policy, {})}
