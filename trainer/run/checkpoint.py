"""Checkpoints: policies, optimizers, RNG and advantage state, written together.

A checkpoint is a folder that is written under a temporary name, fsynced and renamed; `latest` names the newest one.
Only the steps of a checkpoint count as trained: `restore` releases the groups that later steps have consumed.
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
"""Number of checkpoints that stay: the newest, and the one before it, in case the newest is damaged on the disk."""


class BestLoss(msgspec.Struct, frozen=True):
    """The lowest held-out loss of a policy."""

    loss: float
    step: int
    """Number of steps after which it was measured."""
    since: int = 0
    """Number of later losses, none of which was lower."""


class Checkpoint(msgspec.Struct, kw_only=True):
    """The state of a run between steps. A checkpoint folder also has the learner's weights and optimizers."""

    steps: int = 0
    """Steps done."""
    run: str = ""
    """The id of the run."""
    prompts: str = ""
    """The id of the edited prompts of the training."""
    versions: dict[str, int] = {}
    """The served version of each policy that has been published."""
    policies: Policies
    new_roles: tuple[str, ...] = ()
    """Roles first seen in the last step: they get policies before the next one."""
    silent: dict[str, int] = {}
    """Trained roles without a call in the last steps, each with the number of these steps."""
    advantages: AdvantageState = msgspec.field(name="state", default=AdvantageState())
    tasks: dict[str, TaskFacts] = {}
    """The results so far of each task that was drawn, by id."""
    drawn: dict[int, DrawnTasks] = {}
    """The tasks of the steps that are rolled out next."""
    metrics: dict[str, dict[str, float]] = {}
    """Latest figures of each role, for the export."""
    best: dict[str, BestLoss] = {}
    """The lowest held-out loss so far of each policy that learns from records."""


def save_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    learner: Learner,
    *,
    spare: Collection[str] = (),
    best: Mapping[str, Best] | None = None,
) -> Path:
    """Write `folder/step-NNNNNN` atomically. `latest` then names it, and `best.json` the checkpoints in `best`.

    Then remove older checkpoints except the newest `KEPT_CHECKPOINTS`, the `best` ones and the ones named in `spare`.
    """
    target = folder / checkpoint_name(checkpoint.steps)
    partial = folder / f".{target.name}.partial"
    replaced = _name_while_removed(target)
    for stale in (partial, replaced):
        if stale.exists():
            shutil.rmtree(stale)

    # Write everything under a temporary name, and wait until it is on the disk.
    partial.mkdir(parents=True)
    learner.save(partial)
    write_atomically(partial / CHECKPOINT, msgspec.json.encode(checkpoint))
    write_atomically(partial / POLICIES, json.dumps(msgspec.to_builtins(_policies(checkpoint)), indent=2).encode())
    write_hashes(partial)
    mode = (partial / CHECKPOINT).stat().st_mode
    for path in partial.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors creates files that only their owner can read
        sync(path)
    sync(partial)

    # Give the folder its name. `tidy_checkpoints` repairs a crash between the two renames.
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync(folder)
    write_atomically(latest_in(folder), target.name.encode())
    if best:
        write_best(folder, best)

    # Only now remove older checkpoints, so that there is a complete one at any time.
    if replaced.exists():
        shutil.rmtree(replaced)
    protected = set(spare)
    if best:
        protected.update(best_of_policy.checkpoint for best_of_policy in best.values())
    up_to_target = [path for path in step_folders(folder) if path.name <= target.name]
    for old in up_to_target[:-KEPT_CHECKPOINTS]:
        if old.name not in protected:
            remove_checkpoint(old)
    return target


def write_best(folder: Path, best: Mapping[str, Best]) -> None:
    """Write `best.json`, which names the best checkpoint of each policy."""
    write_atomically(folder / BEST, msgspec.json.encode(best))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a checkpoint that is partly removed is never used."""
    path.rename(_name_while_removed(path))
    shutil.rmtree(_name_while_removed(path))


def tidy_checkpoints(folder: Path) -> None:
    """Clean up after a process that ended while it wrote or removed a checkpoint."""
    newest = newest_checkpoint(folder)
    for unfinished in folder.glob(".step-*"):
        if newest is not None and unfinished == _name_while_removed(newest) and not newest.exists():
            unfinished.rename(newest)  # `save_checkpoint` ended between its two renames
        else:
            shutil.rmtree(unfinished)


def _name_while_removed(checkpoint: Path) -> Path:
    """Return the name of a checkpoint while it is removed or replaced."""
    return checkpoint.with_name(f".{checkpoint.name}.removed")


def load_checkpoint(folder: Path) -> tuple[Checkpoint, Path] | None:
    """Load the newest complete checkpoint of a run, with its folder; None if the run has made no step yet.

    Raises RunError if it is missing, or was not written by this run. The error names the run's whole checkpoints.
    """
    newest = newest_checkpoint(folder)
    run = read_run(folder.parent) if is_run(folder.parent) else RunDescription()
    if newest is None:
        has_steps = any(steps_of(other) for other in step_folders(folder)) or bool(read_metrics(folder.parent))
        if has_steps:
            cause = f"The run has made steps, but {latest_in(folder)} is missing."
            raise RunError(cause, _whole_checkpoints(folder, run))
        return None

    fault = checkpoint_fault(newest, run.id)
    if fault is None:
        try:
            checkpoint = msgspec.json.decode((newest / CHECKPOINT).read_bytes(), type=Checkpoint)
            return checkpoint, newest
        except (OSError, msgspec.DecodeError) as error:
            fault = f"{CHECKPOINT}: {error}"
    raise RunError(f"The checkpoint {newest} is broken: {fault}.", _whole_checkpoints(folder, run, newest.name))


def _whole_checkpoints(folder: Path, run: RunDescription, broken: str = "") -> str:
    """Return the remedy if a run cannot be continued from its newest checkpoint: use the newest one that is whole. The
    text names all whole checkpoints. `broken` is the name of the newest checkpoint; empty if it is missing."""
    whole_checkpoints: list[str] = []
    for path in step_folders(folder):
        if path.name != broken and checkpoint_fault(path, run.id) is None:
            whole_checkpoints.append(path.name)
    if not whole_checkpoints:
        other = "other " if broken else ""
        return f"No {other}checkpoint of this run is whole: start a new run."
    *older, newest = whole_checkpoints
    older_note = ""
    if older:
        verb = "is" if len(older) == 1 else "are"
        older_note = f" (so {verb} {', '.join(older)})"
    return f"Continue from {newest}, which is whole{older_note}: echo {newest} > {latest_in(folder)}, and --resume."


def _policies(checkpoint: Checkpoint) -> list[SavedPolicy]:
    """Describe each policy for the export, which reads this without torch."""
    policies = checkpoint.policies
    metrics = checkpoint.metrics
    trained = policies.trained
    saved: list[SavedPolicy] = []
    for spec in policies.specs.values():
        roles = policies.roles_of(spec.name)
        saved.append(
            SavedPolicy(
                name=spec.name,
                kind=spec.kind,
                version=checkpoint.versions.get(spec.name, 0),
                roles=tuple(roles),
                lora=spec.lora if spec.kind == "lora" else None,
                model=spec.model,
                metrics={role: metrics[role] for role in roles if role in metrics},
                weights_file=f"{trained.index(spec.name)}.safetensors" if spec.trained else None,
            )
        )
    return saved
