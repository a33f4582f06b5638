"""One rank of an FSDP learner: a local learner whose weights are divided with FSDP2 among the ranks of its group."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.config.learner import LearnerSettings
from cotune.integrations.cluster import weight_transfer
from cotune.integrations.cluster.weight_transfer import NcclGroups, Offer, Ticket
from cotune.integrations.models.devices import usual_device
from cotune.integrations.models.folder.kinds import sees_images
from cotune.records.policies import Policies
from cotune.sampling.protocol import Weights
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.learner.fsdp.loading import distinct_networks, open_divided
from cotune.trainer.learner.load import allow_tf32, needing_untrained, open_policy_models
from cotune.trainer.learner.local import LocalLearner, use_threads_for
from cotune.trainer.learner.logprob_model import LogprobModel
from cotune.trainer.learner.policy_model import PolicyModel


class TorchProcessGroup:
    """The `ProcessGroup` protocol of learners over a process group of torch.distributed."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """`group` is None for the default process group."""
        self._group = group
        self.rank = get_rank(group)
        self.size = get_world_size(group)

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        reduced = values.clone()  # all_reduce changes its input
        if reduced.numel():
            all_reduce(reduced, operation, group=self._group)
        return reduced


def shard_policies(policies: Iterable[PolicyModel], mesh: DeviceMesh, dtype: str) -> None:
    """Divide every network of the policies over `mesh`, layer by layer, and move the parts to its device.

    Gradients are summed over ranks, in fp32. With `dtype` other than float32 weights are gathered in it.
    """
    for model in distinct_networks(policies):
        _shard_network(model, mesh, dtype)


def _shard_network(model: LogprobModel, mesh: DeviceMesh, dtype: str) -> None:
    """Divide one network over `mesh`, layer by layer and then the remainder, with sums of gradients over ranks."""
    precision = MixedPrecisionPolicy()
    if dtype != "float32":
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    model.fuse_layers(torch.device(mesh.device_type))
    # Layers before the whole model: FSDP gives each call the tensors that no earlier call has taken.
    for layer in _repeated_blocks(model.network):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    register_fsdp_forward_method(model, "states")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the counts of all rows, not of a rank's, so gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # A rank whose rows do not use a tensor must still take part in the sum of its gradient.
    model.set_reduce_scatter_unused_params(True)
    model.sharded = True


def _repeated_blocks(network: Any) -> list[Any]:
    """Return the repeated blocks of a transformer. If it does not name them, all its weights are one group.

    A transformer with images is one group too: ranks may need different numbers of passes over images of different
    forms, and all ranks must take part in each gathering of weights.
    """
    if sees_images(network.config):
        return []
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names]


class FsdpWorker:
    """One rank of an FSDP learner, in a process of its own. All ranks are called with the same arguments, in the same
    order. Rows are passed as bytes (`pack_rows`)."""

    _learner: LocalLearner
    _address: tuple[str, int]
    _shares_gpu: bool
    _sends_from: torch.device
    """The device from which weights are sent to engines: the GPU over NCCL, the CPU over gloo."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._store: dist.TCPStore | None = None
        self._nccl_groups = NcclGroups()

    def listen(self, host: str, seconds: float) -> int:
        """Serve the store that lets ranks find each other, on a free port of rank 0. Returns the port; 0 on other
        ranks, which serve nothing."""
        if self._rank:
            return 0
        wait = timedelta(seconds=seconds)
        self._store = dist.TCPStore(host, 0, self._size, is_master=True, timeout=wait, wait_for_workers=False)
        return int(self._store.port)

    def join(self, host: str, port: int, device: str, seconds: float, shares_gpu: bool = False) -> None:
        """Form the process group: NCCL between GPUs and gloo between CPUs. `seconds` bounds every exchange.

        `shares_gpu` says whether an engine computes on the same GPU: NCCL does not work between both.
        """
        self._address = (host, port)
        self._shares_gpu = shares_gpu
        wait = timedelta(seconds=seconds)
        store = self._store or dist.TCPStore(host, port, self._size, is_master=False, timeout=wait)
        self._device = _device_type(device)
        backend = "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._size, timeout=wait)

    def open(
        self,
        model: str,
        policies: Policies,
        settings: LearnerSettings,
        loss: LossSpec,
        own: Mapping[str, PolicyTraining] = {},
        seed: int = 0,
    ) -> None:
        """Load the trained policies, divide their weights, and build the optimizers."""
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
        allow_tf32(torch.device(self._device))
        # Rank 0 loads whole models into the memory of the CPU. The other ranks get their part of the weights from it.
        reference = needing_untrained(policies, loss, own)

        def load(empty: bool) -> dict[str, PolicyModel]:
            return open_policy_models(
                model, policies, settings, reference=reference, seed=seed, empty=empty, device_name="cpu"
            )

        mesh = init_device_mesh(self._device, (self._size,))
        opened = open_divided(load, lambda models: shard_policies(models, mesh, settings.precision), self._device)
        use_threads_for(opened, settings)
        self._learner = LocalLearner(opened, settings, loss, TorchProcessGroup(), own, seed)
        # Weights are sent to engines over NCCL, from this GPU. If an engine is on the same GPU, or without a GPU, they
        # are sent over gloo, from the CPU.
        self._sends_from = torch.device("cpu")
        if self._device == "cuda" and not self._shares_gpu:
            self._sends_from = torch.device("cuda", torch.cuda.current_device())

    def offer(self, policy: str) -> tuple[Weights, Offer] | None:
        """Gather the full weights of a policy on rank 0, and return them with their facts."""
        weights = self._learner.weights(policy)
        if self._rank:
            return None
        host, port = self._address
        return weights, Offer.of(weights, host, port, self._sends_from.type)

    def send(self, weights: Weights, ticket: Ticket) -> None:
        """Send weights from rank 0 to the workers of an engine. This may run beside other calls."""
        weight_transfer.send(weights, ticket, self._sends_from, self._nccl_groups)

    def update(self, policy: str, rows: bytes, lr_scale: float) -> dict[str, float]:
        return dict(self._learner.update(policy, unpack_rows(rows), lr_scale=lr_scale))

    def learner(self, method: str, *arguments: Any) -> Any:
        """Call a method of this rank's learner. An argument of bytes stands for rows."""
        unpacked = [unpack_rows(argument) if isinstance(argument, bytes) else argument for argument in arguments]
        return getattr(self._learner, method)(*unpacked)

    def begin_profile(self) -> None:
        if self._rank == 0:
            self._learner.begin_profile()

    def end_profile(self, file: str | None) -> None:
        if self._rank == 0:
            self._learner.end_profile(None if file is None else Path(file))

    def save(self, folder: str) -> None:
        self._learner.save_policies(Path(folder))
        dist.barrier()

    def load(self, folder: str, new: list[str]) -> None:
        self._learner.load_policies(Path(folder), new)


def pack_rows(rows: Sequence[TrainRow]) -> bytes:
    """Return rows as bytes, which are sent to another process many times faster than objects."""
    return msgspec.msgpack.encode(list(rows))


def unpack_rows(packed: bytes) -> list[TrainRow]:
    return msgspec.msgpack.decode(packed, type=list[TrainRow])


def _device_type(name: str) -> str:
    if name == "auto":
        return usual_device()
    return str(torch.device(name).type)
