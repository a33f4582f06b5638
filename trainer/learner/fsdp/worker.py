"""One rank of an FSDP learner: a local learner whose weights are divided among the ranks of its process group."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.policies import Policies
from cotune.sampling.protocol import Weights
from cotune.trainer.config.learner import LearnerSettings
from cotune.trainer.learner.fsdp.shard import TorchProcessGroup, shard
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.local import LocalLearner


class FsdpWorker:
    """All ranks are called with the same arguments, in the same order. Rows come packed (`pack_rows`)."""

    _learner: LocalLearner

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._store: dist.TCPStore | None = None

    def listen(self, host: str, seconds: float) -> int:
        """Serve the address book of the group on a free port of rank 0, which is returned."""
        if self._rank:
            return 0
        wait = timedelta(seconds=seconds)
        self._store = dist.TCPStore(host, 0, self._size, is_master=True, timeout=wait, wait_for_workers=False)
        return int(self._store.port)

    def join(self, host: str, port: int, device: str, seconds: float) -> None:
        """Form the process group: NCCL between GPUs and gloo between CPUs. `seconds` bounds every exchange."""
        wait = timedelta(seconds=seconds)
        store = self._store or dist.TCPStore(host, port, self._size, is_master=False, timeout=wait)
        self._device = _device_type(device)
        backend = "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._size, timeout=wait)

    def open(self, model: str, policies: Policies, settings: LearnerSettings, loss: LossSpec, names: list[str]) -> None:
        """Load the policies in `names`, divide their weights, and build the optimizers."""
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        # Whole models stay in the memory of the CPU; only this rank's part goes to the device.
        whole = msgspec.structs.replace(settings, device="cpu")
        opened = open_policy_models(model, policies, whole, reference=loss.kl > 0, names=names)
        shard(opened.values(), init_device_mesh(self._device, (self._size,)), settings.dtype)
        self._learner = LocalLearner(opened, settings, loss, TorchProcessGroup())

    def update(self, policy: str, rows: bytes, lr_scale: float) -> dict[str, float]:
        done = dict(self._learner.update(policy, unpack_rows(rows), lr_scale=lr_scale))
        if self._device == "cuda":
            torch.cuda.empty_cache()  # an engine may share the GPU
        return done

    def logprobs(self, policy: str, rows: bytes) -> list[npt.NDArray[np.float32]]:
        return self._learner.logprobs(policy, unpack_rows(rows))

    def weights(self, policy: str) -> Weights:
        return self._learner.weights(policy)

    def adopt(self, policy: str, weights: Weights) -> None:
        self._learner.adopt(policy, weights)

    def save(self, folder: str) -> None:
        self._learner.save_policies(Path(folder))
        dist.barrier()

    def load(self, folder: str, new: list[str]) -> None:
        self._learner.load_policies(Path(folder), new)


def pack_rows(rows: Sequence[TrainRow]) -> bytes:
    """Rows as bytes, which cross processes many times faster than objects."""
    return msgspec.msgpack.encode(list(rows))


def unpack_rows(packed: bytes) -> list[TrainRow]:
    return msgspec.msgpack.decode(packed, type=list[TrainRow])


def _device_type(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(torch.device(name).type)
