"""What the processes of one learner have to agree on: a few sums and maxima. One process alone agrees with itself."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """The processes that train the same weights together, seen from one of them."""

    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over all ranks, of the same shape on each."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all ranks, of the same shape on each."""
        ...


class SingleProcess:
    """A learner of one process."""

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, which every rank has to ask for; any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (may be empty); any other tensor as it is."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into one that may be sharded."""
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        source = source.to(device=target.device, dtype=target.dtype)
        source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)
