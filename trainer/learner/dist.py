"""Communication between the processes of one learner, and the tensors that are sharded among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class ProcessGroup(Protocol):
    """The processes that train the same weights together. This process has the number `rank` of `size`."""

    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks. `values` must have the same shape on each."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks. `values` must have the same shape on each."""
        ...


class SingleProcess:
    """The group of a learner that has one process."""

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor; any other tensor as it is. All ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which may be empty; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor, `source`, which every rank has, into `target`, which may be sharded."""
    if not is_sharded(target):
        target.copy_(source)
        return
    from torch.distributed.tensor import distribute_tensor

    whole = source.to(device=target.device, dtype=target.dtype)
    # src_data_rank None: each rank takes its part of its own copy, and nothing is sent.
    target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))


def clip_gradients(parameters: Sequence[Tensor], limit: float) -> float:
    """Scale the gradients to an L2 norm of at most `limit`; 0 means no limit. Returns the norm before scaling."""
    if not parameters:
        return 0.0
    norm = gather(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    torch.nn.utils.clip_grads_with_norm_(parameters, limit or float("inf"), norm)
    return float(norm)


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of all tensors together. Tensors may be sharded."""
    return float(gather(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors])))
