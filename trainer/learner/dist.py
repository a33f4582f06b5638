"""Communication between the processes of one learner, and the tensors that are sharded among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class ProcessGroup(Protocol):
    """The processes that train the same weights together, seen from the one with number `rank` of `size`."""

    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over all ranks, of the same shape on each."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all ranks, of the same shape on each."""
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
    """The whole of a sharded tensor, for which all ranks must call this; any other tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (may be empty); any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into one that may be sharded."""
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        source = source.to(device=target.device, dtype=target.dtype)
        source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)


def clip_gradients(parameters: Sequence[Tensor], limit: float) -> float:
    """Scale the gradients to an L2 norm of at most `limit` (0: as they are); returns the norm that they had."""
    if not parameters:
        return 0.0
    norm = gather(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    torch.nn.utils.clip_grads_with_norm_(parameters, limit or float("inf"), norm)
    return float(norm)


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of all tensors together. Each rank may hold a part of a tensor."""
    return float(gather(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors])))
