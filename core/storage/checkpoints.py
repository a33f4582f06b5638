"""The checkpoints of a run: the names of their folders and files, and typed readers of their descriptions.

RUN/checkpoints/step-000012/   weights, optimizers, checkpoint.json, policies.json, hashes.json
RUN/checkpoints/latest         the name of the newest complete one
RUN/checkpoints/best.json      the best one of each policy, by held-out evaluation
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from cotune.errors import RunError
from cotune.records.policies import LoraSpec, PolicyKind
from cotune.storage.typed_json import read_if_typed, read_typed

POLICIES = "policies.json"
"""Name of the file in a checkpoint that describes its policies."""
CHECKPOINT = "checkpoint.json"
"""Name of the file in a checkpoint that holds the state of the run."""
BEST = "best.json"
"""Name of the file in the folder of checkpoints that names the best one of each policy."""
_NAME_ONE = "Write the name of a step folder, like step-000012, into checkpoints/latest."


class CheckpointIdentity(msgspec.Struct, frozen=True):
    """A checkpoint's own description: its steps, and its run by id."""

    steps: int
    run: str = ""


class SavedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a checkpoint's policies.json. `model` is None for the model of the run, `metrics` are by role.

    `weights_file` is a safetensors file of the checkpoint; None for a policy that is not trained.
    """

    name: str
    kind: PolicyKind
    version: int
    roles: tuple[str, ...]
    lora: LoraSpec | None = None
    model: str | None = None
    metrics: dict[str, dict[str, float]] = {}
    weights_file: str | None = None


class Best(msgspec.Struct, frozen=True):
    """The checkpoint with a policy's highest held-out figure, and the figure."""

    checkpoint: Annotated[str, msgspec.Meta(pattern=r"^step-[0-9]+\Z")]
    figure: float


def latest_in(checkpoints: Path) -> Path:
    """The file in a folder of checkpoints that holds the name of the newest one."""
    return checkpoints / "latest"


def checkpoint_name(steps: int) -> str:
    """Name of the checkpoint that is written after this number of steps."""
    return f"step-{steps:06d}"


def steps_of(checkpoint: Path) -> int:
    """The number of steps before a checkpoint was written, from its name."""
    steps = checkpoint.name.rpartition("-")[2]
    if not steps.isdecimal():
        raise RunError(f"{checkpoint} is not the name of a checkpoint.", _NAME_ONE)
    return int(steps)


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint that `latest` names, which may be damaged; None before the first checkpoint.

    Raises RunError if `latest` does not hold the name of a checkpoint.
    """
    latest = latest_in(checkpoints)
    if not latest.is_file():
        return None
    name = latest.read_text(errors="replace").strip().rpartition("/")[2]
    if not name or not name.isprintable():
        raise RunError(f"{latest} names no checkpoint: {name[:100]!r}.", _NAME_ONE)
    return checkpoints / name


def step_folders(checkpoints: Path) -> list[Path]:
    """The folders of checkpoints, complete or not, the oldest first."""
    return sorted(path for path in checkpoints.glob("step-*") if path.name[5:].isdecimal() and path.is_dir())


def read_identity(checkpoint: Path) -> CheckpointIdentity | None:
    """A checkpoint's own description; None if it cannot be read."""
    return read_if_typed(checkpoint / CHECKPOINT, CheckpointIdentity)


def read_best(checkpoints: Path) -> dict[str, Best]:
    """The best checkpoint of each policy, by name; empty without best.json. Raises RunError for a broken file."""
    file = checkpoints / BEST
    if not file.is_file():
        return {}
    return read_typed(file, dict[str, Best], "Remove it: export takes the newest checkpoint without --step.")


def read_policies(checkpoint: Path) -> list[SavedPolicy]:
    """The policies of a checkpoint. Raises RunError for a file that is missing or broken."""
    remedy = "Name an older checkpoint in checkpoints/latest, or train again."
    return read_typed(checkpoint / POLICIES, list[SavedPolicy], remedy)
