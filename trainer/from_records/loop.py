"""The loop that learns from records: the rows of some recorded episodes a step, until held-out losses cease to fall."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cotune.adapters.export import read_weights
from cotune.algorithms.samples import TrainRow
from cotune.trainer.from_records.run import RecordsRun
from cotune.trainer.reporting.metrics import StepMetrics, Updates, moved, step_seconds, throughput
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.run.checkpoint import BestLoss, commit_checkpoint
from cotune.trainer.run.run_folder import write_atomically
from cotune.trainer.schedules.schedule import lr_scale
from cotune.trainer.updates import update_policies

BEST = "best"
"""Folder of a run with the weights of each policy at its lowest held-out loss."""


async def learn_steps(run: RecordsRun, progress: Progress) -> None:
    """Learn from the run's next step to its last, or until no policy's held-out loss falls, or it is stopped.

    A policy ends with the weights that had its lowest held-out loss.
    """
    activity = progress.activity
    with activity.phase("checkpoint"):
        await commit(run)
    while not run.finished and not run.stopping:
        episodes = run.schedule.of(run.state.steps)
        found = run.recorded.of(episodes, run.players)
        rows = {name: its_rows for name, its_rows in found.items() if name in run.learning}
        with activity.phase("update", ", ".join(rows)):
            updates = await update(run, rows)
        run.state.steps += 1
        with activity.phase("held_out"):
            held_out = await held_out_losses(run)
        metrics = _metrics(run, episodes, rows, updates, held_out, activity.seconds)
        activity.clear()
        run.folder.append_metrics(msgspec.to_builtins(metrics))
        run.state.metrics = metrics.roles
        progress.step(metrics)
        with activity.phase("checkpoint"):
            await commit(run)
    if run.finished:
        await go_back_to_best(run, progress)
    await commit(run, last=True)


async def update(run: RecordsRun, rows: Mapping[str, Sequence[TrainRow]]) -> Updates:
    """Update every policy that has rows."""
    scale = lr_scale(run.config.schedule, run.state.steps, run.config.steps)
    updates = await update_policies(run.learner, rows, scale)
    for name in moved(updates):
        run.state.versions[name] = run.state.versions.get(name, 0) + 1
    return updates


async def held_out_losses(run: RecordsRun) -> dict[str, dict[str, float]]:
    """The held-out loss of each policy that still learns, where it is due; the lowest so far keeps its weights."""
    steps, every = run.state.steps, run.config.evaluation.every
    if steps % every and steps != run.config.steps:
        return {}
    found = {}
    for name in run.learning:
        if name not in run.held_out:
            continue
        found[name] = await asyncio.to_thread(run.learner.loss, name, run.held_out[name])
        best, loss = run.state.best.get(name), found[name]["loss"]
        if best is not None and not loss < best.loss:
            run.state.best[name] = msgspec.structs.replace(best, since=best.since + 1)
            continue
        run.state.best[name] = BestLoss(loss, steps)
        await asyncio.to_thread(_keep_best, run, name)
    return found


async def go_back_to_best(run: RecordsRun, progress: Progress) -> None:
    """Put the weights of each policy back to those of its lowest held-out loss, and say so."""
    for name, best in run.state.best.items():
        progress.say(f"{name}: lowest held-out loss {best.loss:.4f} after step {best.step}; its weights are kept")
        if best.since:
            weights = await asyncio.to_thread(read_weights, _best_file(run, name))
            await asyncio.to_thread(run.learner.adopt, name, weights)
            run.committed = -1


async def commit(run: RecordsRun, *, last: bool = False) -> None:
    """Write a checkpoint where one is due: every `checkpoint_every` steps and after the last."""
    state, config = run.state, run.config
    due = last or state.steps % config.checkpoint_every == 0
    if state.steps != run.committed and due:
        await asyncio.to_thread(commit_checkpoint, run.folder, state, run.learner, keep=config.keep_checkpoints)
        run.committed = state.steps


def _best_file(run: RecordsRun, policy: str) -> Path:
    trained = [name for name, spec in run.state.policies.specs.items() if spec.trained]
    return run.folder.path / BEST / f"{trained.index(policy)}.safetensors"


def _keep_best(run: RecordsRun, policy: str) -> None:
    from safetensors.numpy import save

    file = _best_file(run, policy)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, save(dict(run.learner.weights(policy))))


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
        step=run.state.steps - 1,
        episodes=len(episodes),
        failed=0,
        calls=count,
        candidates=count,
        groups=0,
        rows=count,
        outcome={},
        held_out={},
        roles={role: _of_role(role, name, rows, updates, after) for role, name in run.players.items() if name in rows},
        policies={
            name: {"version": versions.get(name, 0), **figures, **after.get(name, {})}
            for name, figures in updates.items()
        },
        left_out=dict(run.recorded.left_out) if run.state.steps == 1 else {},
        staleness={},
        counters={},
        lr_scale=lr_scale(run.config.schedule, run.state.steps - 1, run.config.steps),
        seconds=dict(seconds),
        **{**throughput(updates, seconds), "tokens_per_s": tokens / max(step_seconds(seconds), 1e-9)},
        updated=bool(moved(updates)),
        notes=tuple(run.notes) if run.state.steps == 1 else (),
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
