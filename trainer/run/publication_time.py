"""An estimate of the time to publish a policy that trains all its weights, for the lines before the first step."""

from __future__ import annotations

import contextlib
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Literal

import numpy as np

from cotune.config.train import TrainConfig
from cotune.integrations.models.folder import folder as model_folder
from cotune.integrations.models.folder.folder import count_parameters, locate_model
from cotune.integrations.models.vllm.adapters import SharedFolders
from cotune.records.policies import Policies
from cotune.sampling.protocol import Weights, fingerprint, weights_norm
from cotune.trainer.config.engine import engine_kind

SAMPLE_BYTES = 32 << 20
FLOAT_BYTES = 4
"""Weights are published in float32."""
Way = Literal["direct", "files", "pipe"]
"""How weights get to the sampler: directly from the learner to the workers of an engine, by files, or through the pipe
of the in-process engine."""
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

    way, description = publication_way(config)
    rate = seconds_per_byte(way)
    notes = []
    for model in large:
        size = sizes[model]
        names = ", ".join(policies_of_base[model])
        notes.append(
            f"all weights of {names} go to the sampler after each step: {size / 1e9:.2g} GB{description}, about "
            f"{size * rate:.2g} s each (estimated from {SAMPLE_BYTES / 1e6:.0f} MB of numbers on this machine)"
        )
    return notes


def publication_way(config: TrainConfig) -> tuple[Way, str]:
    """Return the way by which full weights get to the sampler, and its description for the user."""
    cluster = config.cluster
    if not engine_kind(config).fixed:  # an engine in this process, which can hold several versions
        return "pipe", ""
    if not cluster.on_ray:
        return "files", " by files"
    over_nccl = cluster.gpus_per_engine > 0 and cluster.gpus_per_learner > 0 and not cluster.shares_gpu
    return "direct", " over NCCL" if over_nccl else " over gloo"


def seconds_per_byte(way: Way) -> float:
    """Measure the seconds to publish a byte of weights in this way, by doing with a sample of random weights once what
    a publication does: the transfer, and the checks of sender and receiver.

    A direct transfer is measured over gloo, because NCCL needs two GPUs.
    """
    sample = {"weights": np.random.default_rng(0).standard_normal(SAMPLE_BYTES // FLOAT_BYTES, dtype=np.float32)}
    if way == "direct":
        # Without gloo on this machine, the weights will go by files, which are measured below.
        with contextlib.suppress(RuntimeError):
            return _time_direct_transfer(sample) / SAMPLE_BYTES
    started = time.perf_counter()
    # The checks, and the way through the pipe between two processes. Files are written and read in addition.
    weights_norm(sample)
    for _ in range(FINGERPRINTS):
        fingerprint(sample)
    pickle.loads(pickle.dumps(sample))
    if way != "pipe":
        with closing(SharedFolders()) as folders:
            folder = folders.make("sample", SAMPLE_BYTES)
            model_folder.write_tensors(folder, sample)
            for file in folder.iterdir():
                file.read_bytes()
    return (time.perf_counter() - started) / SAMPLE_BYTES


def _time_direct_transfer(sample: Weights) -> float:
    """Measure the seconds to send a sample over gloo from a thread of this process to another, with the checks of both
    sides. Imports and the start of the server do not count."""
    import torch
    import torch.distributed as dist

    from cotune.integrations.cluster.weight_transfer import NcclGroups, Offer, Receiver, new_ticket, send

    cpu = torch.device("cpu")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = time.perf_counter()
    ticket = new_ticket(Offer.of(sample, "127.0.0.1", store.port, "cpu"), 1, "cpu")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, sample, ticket, cpu, NcclGroups())
        for _ in Receiver(ticket, 1, cpu).tensors():
            pass
        sending.result()
    return time.perf_counter() - started
