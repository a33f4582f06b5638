"""Checkpoints: policies, optimizers, RNG and advantage state, written as one.

A checkpoint is a folder written under a temporary name, fsynced and renamed; `latest` names the newest one. Only the
steps of a checkpoint count as trained: `restore` releases the groups that later ones have consumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from cotune.adapters.fingerprint import checkpoint_fault, write_hashes
from cotune.algorithms.step import AdvantageState
from cotune.algorithms.task_signals import TaskFacts
from cotune.errors import RunError
from cotune.records.policies import Policies
from cotune.storage.checkpoints import (
    BEST,
    CHECKPOINT,
    POLICIES,
    Best,
    SavedPolicy,
    checkpoint_name,
    latest_in,
    newest_checkpoint,
    step_folders,
    steps_of,
)
from cotune.storage.metrics_file import read_metrics
from cotune.storage.run_layout import RunDescription, is_run, read_run
from cotune.storage.whole_file import sync
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.run.run_folder import write_atomically
from cotune.trainer.schedules.task_pool import DrawnTasks

KEPT_CHECKPOINTS = 2
"""The newest checkpoint, and the one before it, in case the newest is damaged on the disk."""


class BestLoss(msgspec.Struct, frozen=True):
    """The lowest held-out loss of a policy, after so many steps, and how many later ones were not lower."""

    loss: float
    step: int
    since: int = 0


class Checkpoint(msgspec.Struct, kw_only=True):
    """State of a run between steps; a checkpoint also holds the learner's weights and optimizers."""

    steps: int = 0
    """Steps done."""
    run: str = ""
    """The id of the run."""
    prompts: str = ""
    """The id of the edited prompts that it was trained with."""
    versions: dict[str, int] = {}
    """The served version of each policy that has been published."""
    policies: Policies
    new_roles: tuple[str, ...] = ()
    """Roles first seen in the last step: they get policies before the next one."""
    silent: dict[str, int] = {}
    """Trained roles that have called in no episode of the last steps, and of how many."""
    advantages: AdvantageState = msgspec.field(name="state", default=AdvantageState())
    tasks: dict[str, TaskFacts] = {}
    """What is known of each task that was tried, by id."""
    drawn: dict[int, DrawnTasks] = {}
    """The tasks of the steps that are rolled out next."""
    metrics: dict[str, dict[str, float]] = {}
    """Latest figures of each role, for the export."""
    best: dict[str, BestLoss] = {}
    """Of each policy that learns from records, the lowest held-out loss so far."""


def save_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    learner: Learner,
    *,
    spare: Collection[str] = (),
    best: Mapping[str, Best] | None = None,
) -> Path:
    """Write `folder/step-NNNNNN` atomically, point `latest` at it, and `best.json` at the `best` ones; then remove all
    but the newest `KEPT_CHECKPOINTS`, and `spare`."""
    target = folder / checkpoint_name(checkpoint.steps)
    partial, replaced = folder / f".{target.name}.partial", _aside(target)
    for stale in (partial, replaced):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir(parents=True)
    learner.save(partial)
    write_atomically(partial / CHECKPOINT, msgspec.json.encode(checkpoint))
    write_atomically(partial / POLICIES, json.dumps(msgspec.to_builtins(_policies(checkpoint)), indent=2).encode())
    write_hashes(partial)
    mode = (partial / CHECKPOINT).stat().st_mode
    for file in partial.rglob("*"):
        if file.is_file():
            file.chmod(mode)  # safetensors makes files for their owner alone
        sync(file)
    sync(partial)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync(folder)
    write_atomically(latest_in(folder), target.name.encode())
    if best:
        write_best(folder, best)
    if replaced.exists():
        shutil.rmtree(replaced)
    kept = {*spare, *(one.checkpoint for one in (best or {}).values())}
    for old in [path for path in step_folders(folder) if path.name <= target.name][:-KEPT_CHECKPOINTS]:
        if old.name not in kept:
            remove_checkpoint(old)
    return target


def write_best(folder: Path, best: Mapping[str, Best]) -> None:
    """Name the best checkpoint of each policy."""
    write_atomically(folder / BEST, msgspec.json.encode(best))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: first its name, so that no part of it is ever taken for a checkpoint."""
    path.rename(_aside(path))
    shutil.rmtree(_aside(path))


def tidy_checkpoints(folder: Path) -> None:
    """Remove what a process left that ended while it wrote or removed a checkpoint."""
    newest = newest_checkpoint(folder)
    for left in folder.glob(".step-*"):
        if newest is not None and left == _aside(newest) and not newest.exists():
            left.rename(newest)  # it was about to be replaced
        else:
            shutil.rmtree(left)


def _aside(checkpoint: Path) -> Path:
    """Where a checkpoint is while it is removed."""
    return checkpoint.with_name(f".{checkpoint.name}.removed")


def load_checkpoint(folder: Path) -> tuple[Checkpoint, Path] | None:
    """The newest complete checkpoint of a run and its folder; None where the run has made no step yet.

    Raises RunError where it is missing, or is not what this run has written, naming the checkpoints that are.
    """
    path = newest_checkpoint(folder)
    run = read_run(folder.parent) if is_run(folder.parent) else RunDescription()
    if path is None:
        made = [steps_of(other) for other in step_folders(folder)] + [1 for _ in read_metrics(folder.parent)]
        if not any(made):
            return None
        raise RunError(f"The run has made steps, but {latest_in(folder)} is missing.", _way_back(folder, run))
    wrong = checkpoint_fault(path, run.id)
    if wrong is None:
        try:
            return msgspec.json.decode((path / CHECKPOINT).read_bytes(), type=Checkpoint), path
        except (OSError, msgspec.DecodeError) as error:
            wrong = f"{CHECKPOINT}: {error}"
    raise RunError(f"The checkpoint {path} is broken: {wrong}.", _way_back(folder, run, path.name))


def _way_back(folder: Path, run: RunDescription, broken: str = "") -> str:
    there = [path for path in step_folders(folder) if path.name != broken]
    whole = [path.name for path in there if checkpoint_fault(path, run.id) is None]
    if not whole:
        return f"No {'other ' if broken else ''}checkpoint of this run is whole: start a new run."
    *others, newest = whole
    more = f" (so {'is' if len(others) == 1 else 'are'} {', '.join(others)})" if others else ""
    return f"Go on from {newest}, which is whole{more}: echo {newest} > {latest_in(folder)}, and --resume."


def _policies(checkpoint: Checkpoint) -> list[SavedPolicy]:
    """What the export needs to know of each policy, readable without torch."""
    policies, metrics = checkpoint.policies, checkpoint.metrics
    trained = policies.trained
    return [
        SavedPolicy(
            name=spec.name,
            kind=spec.kind,
            version=checkpoint.versions.get(spec.name, 0),
            roles=tuple(policies.roles_of(spec.name)),
            lora=spec.lora if spec.kind == "lora" else None,
            model=spec.model,
            metrics={role: metrics[role] for role in policies.roles_of(spec.name) if role in metrics},
            weights_file=f"{trained.index(spec.name)}.safetensors" if spec.trained else None,
        )
        for spec in policies.specs.values()
    ]
