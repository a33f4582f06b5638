"""Trained policies with their weights, as a run's newest checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cotune.adapters.fingerprint import changed
from cotune.errors import AdapterError, RunError
from cotune.policies import LoraSpec, PolicyKind
from cotune.sampling.protocol import Weights
from cotune.storage.run_layout import RunLayout, newest_checkpoint, read_policies, read_run


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


def latest_policies(run: str | Path) -> list[TrainedPolicy]:
    """Policies of the newest checkpoint of a run, with their weights. Raises RunError, AdapterError."""
    described = read_run(run)
    checkpoint = newest_checkpoint(RunLayout(run).checkpoints)
    if checkpoint is None:
        raise RunError(f"{run} has no checkpoint yet.", "Let the run finish a step.")
    if wrong := changed(checkpoint):
        remedy = "Name an older checkpoint in checkpoints/latest, or train again."
        raise RunError(f"The checkpoint {checkpoint} is broken: {wrong}.", remedy)
    return [
        TrainedPolicy(
            name=entry.name,
            kind=entry.kind,
            version=entry.version,
            roles=entry.roles,
            model=entry.model or described.model,
            weights=read_weights(checkpoint / entry.weights_file) if entry.weights_file else None,
            lora=entry.lora,
            metrics=entry.metrics,
        )
        for entry in read_policies(checkpoint)
    ]


def read_weights(path: Path) -> Weights:
    """Arrays of a safetensors file. Raises AdapterError when it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}.", "Export or train again.") from None
