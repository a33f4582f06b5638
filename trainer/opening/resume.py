"""Resuming a run: which settings may change, and checks that tasks and base model are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cotune.adapters.fingerprint import base_fingerprint, other_parts
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, RunError
from cotune.integrations.models.folder.folder import locate_model
from cotune.json_values import plain
from cotune.records.step_ranges import within
from cotune.records.structs import Task
from cotune.storage.run_layout import Held, leaves
from cotune.trainer.config.load import assign, convert, refuse_search_options
from cotune.trainer.run.run_folder import RunFolder

MAY_CHANGE = (
    "model", "roles", "steps", "tasks_per_step", "concurrency", "checkpoint_every", "probe_bound",
    "episode_timeout", "learner.device",
    "learner.dtype", "learner.memory",
    "evaluation", "guard", "engine", "engine_args", "cluster",
    "records.path", "distill.teacher",
    "prices", "loggers", "project",
)  # fmt: skip
"""Settings that a resumed run may change: length, concurrency, memory, machines. `model` is the same model elsewhere,
`distill.teacher` the same teacher, also those of a [[policy]], and `roles` may name more. `train` of a [[policy]] may
change for steps to come."""

Changes = Mapping[str, tuple[Any, Any]]
"""Old and new value of each field that was changed, by its dotted name."""


def apply_changes(config: TrainConfig, changes: Mapping[str, Any], *, done: int) -> tuple[TrainConfig, Changes]:
    """`config` with `changes` (dotted names or nested tables), and those of them that change a value.

    `done` is how many steps the run has made. Raises ConfigError, with the old and the new value, for what would make
    it another run.
    """
    refuse_search_options(changes)
    before = msgspec.to_builtins(config)
    table = msgspec.to_builtins(config)
    for name, value in leaves(changes):
        assign(table, name, value)
    new = convert(table)
    old, now = dict(leaves(before)), dict(leaves(msgspec.to_builtins(new)))
    found = {name: (old.get(name), now.get(name)) for name in {**old, **now} if old.get(name) != now.get(name)}
    for name, (was, value) in found.items():
        if name == "policy" and _held(was, done) == _held(value, done):
            continue
        if not any(name == field or name.startswith(f"{field}.") for field in MAY_CHANGE):
            raise ConfigError(
                name,
                value,
                f"was {was!r} when the run was started",
                f"Leave it out to go on, or start a new run. What may change: {', '.join(MAY_CHANGE)}.",
            )
    if new.steps < done:
        raise ConfigError(
            "steps", new.steps, f"is less than the {done} that the run has made", "Leave it out to go on."
        )
    if lost := sorted(set(config.roles) - set(new.roles)):
        raise ConfigError("roles", list(new.roles), f"lacks {', '.join(lost)}, which the run has", "Name them too.")
    return new, found


def _held(policies: Any, done: int) -> list[dict[str, Any]]:
    """What may not change of [[policy]] tables: not where models are, nor in which of the steps to come they train."""
    return [
        {**one, "model": "", "teacher": bool(one["teacher"]), "train": [within(one["train"], i) for i in range(done)]}
        for one in policies
    ]


def check_files(folder: RunFolder, done: int, config: TrainConfig) -> None:
    """Raises RunError where a run that has made `done` steps lacks its records or the lines of its steps."""
    for file in [folder.metrics, *([] if config.from_records else [folder.records])] if done else []:
        if not file.exists():
            raise RunError(
                f"{file} is missing, though the run has made {done} steps.",
                f"Put it back. To go on without what it held: touch {file}, and --resume.",
            )


def tasks_per_step(config: TrainConfig, changes: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """How many tasks a step takes, as (first step that takes so many, count); `changes` as in run.json."""
    made = [(at["step"], at["changed"]["tasks_per_step"]) for at in changes if "tasks_per_step" in at["changed"]]
    first = made[0][1][0] if made else config.tasks_per_step
    return list({0: first, **{step: new for step, (_, new) in made}}.items())


def tasks_digest(tasks: Sequence[Task]) -> str:
    """What tells two lists of tasks apart, in hex: ids and inputs, in order; an object without fields is its type: its
    text may hold an address."""
    inputs = [(task.id, task.input) for task in tasks]
    content = msgspec.json.encode(inputs, enc_hook=lambda value: plain(value, lambda other: type(other).__name__))
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_tasks(described: Mapping[str, Any], tasks: Sequence[Task]) -> None:
    """Raises RunError unless the tasks are those that the run was started with."""
    held = described.get("held") or {}
    if "tasks" in held and held["tasks"] != tasks_digest(tasks):
        raise RunError(
            f"The tasks are other than the run was started with: {held['count']} then, {len(tasks)} now.",
            f"Give it the same tasks ({described['tasks'] or 'as in Python'}), or start a new run.",
        )


def base_digests(bases: Mapping[str, Sequence[str]]) -> Held:
    """Digests of base models, the run's own first, with the policies of each; reads all their weights."""
    digests = [msgspec.to_builtins(base_fingerprint(locate_model(model))) for model in bases]
    return Held(
        base=digests[0],
        bases={name: of for of, names in zip(digests[1:], list(bases.values())[1:], strict=True) for name in names},
    )


def check_bases(folder: RunFolder, now: Held) -> None:
    """Write the base models' digests to run.json. Raises RunError where it holds those of another model."""
    described = folder.described
    held = described.get("held") or {}
    if "base" not in held:
        more = {"bases": now.bases} if now.bases else {}
        folder.describe_as({**described, "held": {**held, "base": now.base, **more}})
        return
    before = msgspec.convert(held, Held)
    for policy in dict.fromkeys(["", *before.bases, *now.bases]):
        if other := other_parts(before.of(policy), now.of(policy)):
            whose = f" of policy {policy!r}" if policy else ""
            raise RunError(
                f"The base model{whose} is not the one that the run was started with: its {', '.join(other)} changed.",
                "Put the old one back, name where it is with --model, or start a new run.",
            )
