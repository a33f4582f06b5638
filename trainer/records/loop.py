"""Training from records (recipes sft, dpo and sweet_rl): in each step the rows of some recorded episodes, until
held-out losses no longer fall."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cotune.adapters.export import read_weights
from cotune.algorithms.samples import TrainRow
from cotune.storage.metrics_file import StepMetrics
from cotune.trainer.commit import commit
from cotune.trainer.records.run import RecordsRun
from cotune.trainer.reporting.metrics import Updates, policies_that_moved, step_seconds, throughput_fields
from cotune.trainer.reporting.profile import profiling
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.run.checkpoint import BestLoss
from cotune.trainer.run.run_folder import write_atomically
from cotune.trainer.schedules.schedule import lr_scale
from cotune.trainer.step_report import StepReport
from cotune.trainer.updates import update_policies

BEST = "best"
"""Folder of a run with the weights of each policy at its lowest held-out loss."""


async def train_on_records(run: RecordsRun, progress: Progress) -> None:
    """Train from the run's next step to its last one, until no policy learns any more, or until the run is stopped.

    At the end of a finished run, each policy gets the weights of its lowest held-out loss.
    """
    report = StepReport(run, progress)
    with report.phase("checkpoint"):
        await commit(run)
    while not (run.finished or run.stopping):
        async with profiling(run, progress):
            # The rows of the step's episodes, for the policies that still learn.
            episodes = run.schedule.of(run.state.steps)
            all_rows = run.recorded.of(episodes, run.trained)
            rows = {policy: all_rows[policy] for policy in all_rows if policy in run.learning}

            with report.phase("update", ", ".join(rows)):
                scales = {policy: run.lr_scale(policy) for policy in rows}
                updates = await update_policies(run.learner, rows, scales)
            for policy in policies_that_moved(updates):  # a version is only counted: no sampler serves it
                run.state.versions[policy] = run.state.versions.get(policy, 0) + 1

            with report.phase("held_out"):
                held_out = await _held_out_losses(run)
            metrics = _metrics(run, episodes, rows, updates, held_out, progress.activity.seconds)
            report.write(metrics)
            run.state.metrics = metrics.roles
            run.state.steps += 1
            with report.phase("checkpoint"):
                await commit(run)
    if run.finished:
        await _adopt_best_weights(run, progress)
    await commit(run, due=True)


async def _held_out_losses(run: RecordsRun) -> dict[str, dict[str, float]]:
    """Measure the held-out loss, and its further figures, of each policy that still learns. Returns nothing if no
    evaluation is due after this step.

    Also write the weights of a policy to a file if its loss is the lowest so far, and count the losses since then.
    """
    steps = run.state.steps + 1
    if steps % run.config.evaluation.every and steps != run.config.steps:
        return {}
    losses = {}
    for policy in run.learning:
        if policy not in run.held_out:
            continue
        losses[policy] = await asyncio.to_thread(run.learner.loss, policy, run.held_out[policy])
        best = run.state.best.get(policy)
        loss = losses[policy]["loss"]
        if best is None or loss < best.loss:
            run.state.best[policy] = BestLoss(loss, steps)
            await asyncio.to_thread(_write_best_weights, run, policy)
        else:
            # `RecordsRun.learning` ends the training of a policy after `PATIENCE` losses that were not lower.
            run.state.best[policy] = msgspec.structs.replace(best, since=best.since + 1)
    return losses


def _write_best_weights(run: RecordsRun, policy: str) -> None:
    """Write the present weights of a policy as its best ones."""
    from safetensors.numpy import save

    file = _best_file(run, policy)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, save(dict(run.learner.weights(policy))))


async def _adopt_best_weights(run: RecordsRun, progress: Progress) -> None:
    """Load the weights of the lowest held-out loss into the learner, for each policy."""
    for policy, best in run.state.best.items():
        progress.say(f"{policy}: lowest held-out loss {best.loss:.4f} after step {best.step}; its weights are kept")
        # The learner has later weights if evaluations since the best one were no better.
        if best.since:
            weights = await asyncio.to_thread(read_weights, _best_file(run, policy))
            await asyncio.to_thread(run.learner.adopt, policy, weights)
            # The newest checkpoint has the weights of the last step. This lets `commit` write it again.
            run.committed = -1


def _best_file(run: RecordsRun, policy: str) -> Path:
    """Return the file for the weights of a policy's lowest held-out loss."""
    return run.folder.path / BEST / f"{run.state.policies.trained.index(policy)}.safetensors"


def _metrics(
    run: RecordsRun,
    episodes: Sequence[str],
    rows: Mapping[str, Sequence[TrainRow]],
    updates: Updates,
    held_out: Mapping[str, Mapping[str, float]],
    seconds: Mapping[str, float],
) -> StepMetrics:
    """Compute the figures of a training step on records. There is no sampler, so figures of rollouts are 0 or empty.

    `rows`, `updates` and `held_out` have the rows of the step, the metrics of the update, and the held-out losses of
    each policy. `seconds` are the durations of the phases.
    """
    first_step = run.state.steps == 0
    row_count = sum(len(rows_of_policy) for rows_of_policy in rows.values())
    tokens = sum(figures.get("tokens", 0.0) for figures in updates.values())
    rates = throughput_fields(updates, seconds) | {"tokens_per_s": tokens / max(step_seconds(seconds), 1e-9)}

    held_out_figures: dict[str, dict[str, float]] = {}
    for policy, losses in held_out.items():
        held_out_figures[policy] = {f"held_out_{name}": value for name, value in losses.items()}
    roles: dict[str, dict[str, float]] = {}
    for role, policy in run.trained.items():
        if policy in rows:
            rows_of_role = [row for row in rows[policy] if row.role == role]
            roles[role] = _role_figures(rows_of_role, updates[policy]) | held_out_figures.get(policy, {})
    policies: dict[str, dict[str, float]] = {}
    for policy, figures in updates.items():
        version = run.state.versions.get(policy, 0)
        policies[policy] = {"version": version, **figures, **held_out_figures.get(policy, {})}

    return StepMetrics(
        step=run.state.steps,
        episodes=len(episodes),
        failed=0,
        calls=row_count,
        candidates=row_count,
        groups=0,
        rows=row_count,
        outcome={},
        held_out={},
        roles=roles,
        policies=policies,
        left_out=dict(run.recorded.left_out) if first_step else {},
        staleness={},
        counters={},
        lr_scale=lr_scale(run.config.schedule, run.state.steps, run.config.steps),
        seconds=dict(seconds),
        **rates,
        updated=bool(policies_that_moved(updates)),
        notes=tuple(run.notes) if first_step else (),
        stayed={policy: "no gradient" for policy in rows if policy not in policies_that_moved(updates)},
    )


def _role_figures(rows: Sequence[TrainRow], update: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a role from its rows, with the losses of its policy's update."""
    lengths = [sum(row.loss_mask) if row.loss_mask else len(row.response_ids) for row in rows]
    figures = {"rows": float(len(rows)), "tokens_mean": sum(lengths) / max(len(rows), 1)}
    for name in ("loss", "margin", "accuracy"):
        if name in update:
            figures[name] = update[name]
    return figures
