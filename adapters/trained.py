"""Trained policies with their weights, as a run's newest checkpoint holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cotune.adapters.hashes import changed
from cotune.errors import AdapterError, RunError
from cotune.policies import LoraSpec, OtherRoles, PolicyKind
from cotune.sampling.protocol import Weights


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """One policy at one version. `weights` are those of `Learner.weights`; None for a policy that is not trained.

    `model` is the folder or Hugging Face id of its base, None for a provider policy. `metrics` are by role.
    """

    name: str
    kind: PolicyKind
    version: int
    roles: Sequence[str]
    model: str | None
    weights: Weights | None = None
    lora: LoraSpec | None = None
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a checkpoint's policies.json."""

    name: str
    kind: PolicyKind
    version: int
    roles: tuple[str, ...]
    lora: LoraSpec | None = None
    model: str | None = None
    metrics: dict[str, dict[str, float]] = {}
    weights_file: str | None = None


def latest_policies(run: str | Path) -> list[TrainedPolicy]:
    """Policies of the newest checkpoint of a run, with their weights. Raises RunError, AdapterError."""
    folder = Path(run)
    described = _read_json(folder / "run.json", "Name a folder that cotune train wrote.")
    latest = folder / "checkpoints" / "latest"
    if not latest.is_file():
        raise RunError(f"{folder} has no checkpoint yet.", "Let the run finish a step.")
    checkpoint = latest.parent / Path(latest.read_text(errors="replace").strip() or "?").name
    if wrong := changed(checkpoint):
        raise RunError(f"The checkpoint {checkpoint} is broken: {wrong}.", _RESUME)
    try:
        saved = msgspec.convert(_read_json(checkpoint / "policies.json", _RESUME), list[_Saved])
    except msgspec.ValidationError as error:
        raise RunError(f"{checkpoint / 'policies.json'} is broken: {error}.", _RESUME) from None
    model = described.get("model") if isinstance(described, dict) else None
    return [
        TrainedPolicy(
            name=entry.name,
            kind=entry.kind,
            version=entry.version,
            roles=entry.roles,
            model=entry.model or model,
            weights=read_weights(checkpoint / entry.weights_file) if entry.weights_file else None,
            lora=entry.lora,
            metrics=entry.metrics,
        )
        for entry in saved
    ]


def steps_of(run: str | Path) -> tuple[int, int]:
    """Steps that the newest checkpoint of a run has, and steps that the run is to make. Raises RunError."""
    folder = Path(run)
    described = _read_json(folder / "run.json", "Name a folder that cotune train wrote.")
    name = (folder / "checkpoints" / "latest").read_text().strip()
    done = int(name.rpartition("-")[2])
    return done, int((described.get("config") or {}).get("steps", done))


def other_roles_of(run: str | Path) -> OtherRoles:
    """What plays a role of a run that has no policy. Raises RunError."""
    found: OtherRoles = _config_of(run).get("other_roles", "provider")
    return found


def tool_format_of(run: str | Path) -> str:
    """How the model of a run writes tool calls, as its configuration says. Raises RunError."""
    return str(_config_of(run).get("tool_format", "auto"))


def _config_of(run: str | Path) -> Mapping[str, Any]:
    described = _read_json(Path(run) / "run.json", "Name a folder that cotune train wrote.")
    return (described.get("config") if isinstance(described, dict) else None) or {}


def read_weights(path: Path) -> Weights:
    """Arrays of a safetensors file. Raises AdapterError when it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}.", "Export or train again.") from None


_RESUME = "Name an older checkpoint in checkpoints/latest, or train again."


def _read_json(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.", remedy) from None
    except ValueError as error:
        raise RunError(f"{path} is broken: {error}.", remedy) from None
