"""How long it takes to publish a policy that trains all its weights, for the lines before the first step."""

from __future__ import annotations

import pickle
import tempfile
import time
from pathlib import Path

import numpy as np

from cotune.integrations.models.folder import folder as model_folder
from cotune.integrations.models.folder.folder import count_parameters, locate_model
from cotune.records.policies import Policies
from cotune.sampling.protocol import fingerprint
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.publish import norm

SAMPLE_BYTES = 32 << 20
FLOAT_BYTES = 4
"""Weights are published in float32."""
FINGERPRINTS = 3
"""The sender, the router in front of the engine and the engine itself compute one each."""
SHARED_MEMORY = Path("/dev/shm")


def publication_notes(config: TrainConfig, policies: Policies) -> list[str]:
    """One line for each base whose policies train all weights: the seconds after each step, estimated.

    Adapters are small, and are published in the time of a few requests.
    """
    bases: dict[str, list[str]] = {}
    for name in policies.trained:
        spec = policies.specs[name]
        if spec.kind == "full":
            bases.setdefault(spec.model or config.model, []).append(name)
    if not bases:
        return []

    rate, notes = seconds_per_byte(), []
    for model, names in bases.items():
        size = FLOAT_BYTES * count_parameters(locate_model(model))
        notes.append(
            f"all weights of {', '.join(names)} go to the sampler after each step: {size / 1e9:.2g} GB by files, about "
            f"{size * rate:.2g} s each (estimated from {SAMPLE_BYTES / 1e6:.0f} MB of numbers on this machine)"
        )
    return notes


def seconds_per_byte() -> float:
    """Seconds for a byte of weights, measured with a few: checks, one crossing to another process, a file."""
    sample = {"weights": np.random.default_rng(0).standard_normal(SAMPLE_BYTES // FLOAT_BYTES, dtype=np.float32)}
    started = time.perf_counter()
    norm(sample)
    for _ in range(FINGERPRINTS):
        fingerprint(sample)
    pickle.loads(pickle.dumps(sample))
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        model_folder.write_tensors(Path(folder), sample)
        for file in Path(folder).iterdir():
            file.read_bytes()
    return (time.perf_counter() - started) / SAMPLE_BYTES
