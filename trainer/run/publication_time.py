"""An estimate of the time to publish a policy that trains all its weights, for the lines before the first step."""

from __future__ import annotations

import pickle
import time
from contextlib import closing

import numpy as np

from cotune.config.train import TrainConfig
from cotune.integrations.models.folder import folder as model_folder
from cotune.integrations.models.folder.folder import count_parameters, locate_model
from cotune.integrations.models.vllm.adapters import SharedFolders
from cotune.records.policies import Policies
from cotune.sampling.protocol import fingerprint
from cotune.trainer.config.engine import engine_kind
from cotune.trainer.publish import weights_norm

SAMPLE_BYTES = 32 << 20
FLOAT_BYTES = 4
"""Weights are published in float32."""
FINGERPRINTS = 3
"""The sender, the router in front of the engine and the engine itself each compute a fingerprint of the weights."""


def publication_notes(config: TrainConfig, policies: Policies) -> list[str]:
    """Return a line for each base model whose policies train all weights, with the estimated seconds after each step.

    Adapters, and models smaller than the sample that is measured, are published in the time of a few requests.
    """
    policies_of_base: dict[str, list[str]] = {}
    for name in policies.trained:
        spec = policies.specs[name]
        if spec.kind == "full":
            policies_of_base.setdefault(spec.model or config.model, []).append(name)
    sizes = {model: FLOAT_BYTES * count_parameters(locate_model(model)) for model in policies_of_base}
    large = [model for model, size in sizes.items() if size >= SAMPLE_BYTES]
    if not large:
        return []

    by_files = engine_kind(config).fixed  # the in-process engine takes weights through its pipe
    means = " by files" if by_files else ""
    rate = seconds_per_byte(by_files=by_files)
    notes = []
    for model in large:
        size = sizes[model]
        names = ", ".join(policies_of_base[model])
        notes.append(
            f"all weights of {names} go to the sampler after each step: {size / 1e9:.2g} GB{means}, about "
            f"{size * rate:.2g} s each (estimated from {SAMPLE_BYTES / 1e6:.0f} MB of numbers on this machine)"
        )
    return notes


def seconds_per_byte(*, by_files: bool) -> float:
    """Measure the seconds to publish a byte of weights, with a sample of random ones: their checks, one transfer to
    another process, and a file if weights are sent by files."""
    sample = {"weights": np.random.default_rng(0).standard_normal(SAMPLE_BYTES // FLOAT_BYTES, dtype=np.float32)}
    started = time.perf_counter()
    weights_norm(sample)
    for _ in range(FINGERPRINTS):
        fingerprint(sample)
    pickle.loads(pickle.dumps(sample))
    if by_files:
        with closing(SharedFolders()) as folders:
            folder = folders.make("sample", SAMPLE_BYTES)
            model_folder.write_tensors(folder, sample)
            for file in folder.iterdir():
                file.read_bytes()
    return (time.perf_counter() - started) / SAMPLE_BYTES
