"""Resuming a run: which settings may change, and checks that tasks and base model are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cotune.adapters.fingerprint import base_fingerprint, differing_parts
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, RunError
from cotune.integrations.models.folder.folder import locate_model
from cotune.json_values import plain
from cotune.records.step_ranges import within
from cotune.records.structs import Task
from cotune.storage.run_layout import BaseDigests, leaves
from cotune.trainer.config.load import assign, convert, refuse_search_options
from cotune.trainer.run.run_folder import RunFolder

MAY_CHANGE = (
    "model", "roles", "steps", "tasks_per_step", "concurrency", "checkpoint_every", "probe_bound",
    "episode_timeout", "learner.dtype", "learner.memory",
    "evaluation", "guard", "engine", "engine_args", "cluster",
    "records.path", "distill.teacher",
    "prices", "loggers", "project",
)  # fmt: skip
"""Settings that a resumed run may change: length, concurrency, memory, machines. `model` and `distill.teacher` (also of
a [[policy]]) are new locations of the same models, and `roles` may name further roles. `train` of a [[policy]] may
change for future steps."""

Changes = Mapping[str, tuple[Any, Any]]
"""Old and new value of each field that was changed, by its dotted name."""

RUNS_OWN_BASE = ""
"""Stands for the base model of all policies without a base of their own, in place of the name of a policy."""


def apply_changes(config: TrainConfig, changes: Mapping[str, Any], *, done: int) -> tuple[TrainConfig, Changes]:
    """Return the configuration with `changes` (dotted names or nested tables), and the changed values by name.

    `done` is the number of steps that the run has done. Raises ConfigError, with the old and the new value, for a
    change that would make it another run.
    """
    # 1. Apply the changes, and find the fields that differ afterwards.
    refuse_search_options(changes)
    table = msgspec.to_builtins(config)
    for name, value in leaves(changes):
        assign(table, name, value)
    new = convert(table)
    old_values = dict(leaves(msgspec.to_builtins(config)))
    new_values = dict(leaves(msgspec.to_builtins(new)))
    changed: dict[str, tuple[Any, Any]] = {}
    for name in {**old_values, **new_values}:
        old_value = old_values.get(name)
        new_value = new_values.get(name)
        if old_value != new_value:
            changed[name] = (old_value, new_value)

    # 2. Refuse changes that would make it another run.
    for name, (old_value, new_value) in changed.items():
        if name == "policy" and _fixed_parts(old_value, done) == _fixed_parts(new_value, done):
            continue
        if not any(name == field or name.startswith(f"{field}.") for field in MAY_CHANGE):
            raise ConfigError(
                name,
                new_value,
                f"was {old_value!r} when the run was started",
                "Leave it out to continue the run, or start a new one. These settings may change: "
                f"{', '.join(MAY_CHANGE)}.",
            )
    if new.steps < done:
        fault = f"is less than the {done} steps that the run has done"
        raise ConfigError("steps", new.steps, fault, "Leave it out to continue the run.")
    if missing := sorted(set(config.roles) - set(new.roles)):
        fault = f"lacks {', '.join(missing)}, which the run has"
        raise ConfigError("roles", list(new.roles), fault, "Name them too.")
    return new, changed


def _fixed_parts(policies: Any, done: int) -> list[dict[str, Any]]:
    """Return the parts of [[policy]] tables that may not change: all except the locations of models, and the future
    steps in which they are trained.

    The settings of evaluations are among the parts that may not change: the best checkpoint and the gain over the base
    compare evaluations of the whole run. Of a teacher only its presence is fixed, not its location.
    """
    fixed: list[dict[str, Any]] = []
    for policy in policies:
        trained_in_past = [within(policy["train"], step) for step in range(done)]
        fixed_policy = {**policy, "model": "", "teacher": bool(policy["teacher"]), "train": trained_in_past}
        fixed.append(fixed_policy)
    return fixed


def check_files(folder: RunFolder, done: int, config: TrainConfig) -> None:
    """Raise RunError if a run that has done steps lacks its records or its metrics."""
    if not done:
        return
    files = [folder.metrics]
    if not config.from_records:
        files.append(folder.records)
    for file in files:
        if not file.exists():
            raise RunError(
                f"{file} is missing, though the run has made {done} steps.",
                f"Put it back. To continue without its content: touch {file}, and --resume.",
            )


def steps_at_start(config: TrainConfig, changes: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of steps with which the run was started. It divides the levels of a curriculum.

    `changes` are the changes of settings in run.json. With the present number in its place, the tasks of steps that are
    done would change when the run gets longer.
    """
    for change in changes:
        if "steps" in change["changed"]:
            steps_before, _steps_after = change["changed"]["steps"]
            return int(steps_before)
    return config.steps


def tasks_per_step(config: TrainConfig, changes: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the numbers of tasks of the run's steps, as pairs: the first step with this number, and the number.

    `changes` are the changes of settings in run.json, each with the old and the new value.
    """
    changes_of_count = [change for change in changes if "tasks_per_step" in change["changed"]]
    if not changes_of_count:
        return [(0, config.tasks_per_step)]
    count_at_start, _count_after = changes_of_count[0]["changed"]["tasks_per_step"]
    counts = {0: count_at_start}
    for change in changes_of_count:
        _count_before, count_after = change["changed"]["tasks_per_step"]
        counts[change["step"]] = count_after
    return list(counts.items())


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Return a digest of the ids and inputs of tasks, in their order, in hex.

    An object without fields counts as its type, because its text may contain an address of memory.
    """
    inputs = [(task.id, task.input) for task in tasks]

    def name_of_type(value: object) -> str:
        return type(value).__name__

    # `plain` makes objects of the application into JSON, and calls its second argument for objects without fields.
    content = msgspec.json.encode(inputs, enc_hook=lambda value: plain(value, name_of_type))
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_tasks(described: Mapping[str, Any], tasks: Sequence[Task]) -> None:
    """Raise RunError if the run was started with other tasks. `described` is the content of run.json."""
    # The digests and counts that were taken when the run was started.
    at_start = described.get("held") or {}
    if "tasks" not in at_start or at_start["tasks"] == tasks_digest(tasks):
        return
    difference = f"{at_start['count']} then, {len(tasks)} now"
    if at_start["count"] == len(tasks):
        difference = "ids, inputs or their order changed"
    file = described["tasks"] or "the ones passed from Python"
    raise RunError(
        f"The tasks are not the ones that the run was started with: {difference}.",
        f"Pass the same tasks ({file}), or start a new run.",
    )


def base_digests(bases: Mapping[str, Sequence[str]]) -> BaseDigests:
    """Compute the digests of base models, which reads all their weights.

    `bases` has the policies of each base model. The first one is the run's own.
    """
    runs_own, *others = bases
    digest_of_policy: dict[str, Any] = {}
    own_digest = msgspec.to_builtins(base_fingerprint(locate_model(runs_own)))
    for model in others:
        digest = msgspec.to_builtins(base_fingerprint(locate_model(model)))
        digest_of_policy |= dict.fromkeys(bases[model], digest)
    return BaseDigests(base=own_digest, bases=digest_of_policy)


def keep_or_check_bases(folder: RunFolder, present: BaseDigests) -> None:
    """Write the base models' digests to run.json at the first start, and check them against it later. Raises RunError
    if a base model has changed."""
    described = folder.described
    at_start = described.get("held") or {}
    if "base" not in at_start:
        digests: dict[str, Any] = {"base": present.base}
        if present.bases:
            digests["bases"] = present.bases
        folder.describe_as({**described, "held": {**at_start, **digests}})
        return
    before = msgspec.convert(at_start, BaseDigests)
    for policy in dict.fromkeys([RUNS_OWN_BASE, *before.bases, *present.bases]):
        changed = differing_parts(before.of(policy), present.of(policy))
        if changed:
            subject = f"The base model of policy {policy!r}" if policy else "The base model"
            raise RunError(
                f"{subject} is not the one that the run was started with: its {', '.join(changed)} changed.",
                "Put the old one back, set its present location with --model, or start a new run.",
            )
