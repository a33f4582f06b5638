"""Divides the weights of opened policies among ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cotune.trainer.learner.logprob_model import LogprobModel
from cotune.trainer.learner.policy_model import PolicyModel


class TorchProcessGroup:
    """A process group of torch.distributed (None: the default one)."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = get_rank(group)
        self.size = get_world_size(group)

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        values = values.clone()
        if values.numel():
            all_reduce(values, operation, group=self._group)
        return values


def shard(policies: Iterable[PolicyModel], mesh: DeviceMesh, dtype: str) -> None:
    """Divide every network of the policies over `mesh`, layer by layer, and move the parts to its device.

    Gradients are summed over ranks, in fp32. With `dtype` other than float32 weights are gathered in it.
    """
    models = {id(m): m for policy in policies for m in (policy.logprob_model, policy.frozen_copy) if m is not None}
    for model in models.values():
        _shard(model, mesh, dtype)


def _shard(model: LogprobModel, mesh: DeviceMesh, dtype: str) -> None:
    precision = MixedPrecisionPolicy()
    if dtype != "float32":
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    for layer in _layers(model.network):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    model.sharded = True


def _layers(network: Any) -> list[Any]:
    """The repeated blocks of a transformer; where it does not name them, there is one group for all its weights."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names]
