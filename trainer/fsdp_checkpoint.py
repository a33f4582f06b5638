"""Optimizer states in PyTorch's distributed checkpoints: each rank writes its own part, any number of ranks reads."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from cotune.errors import RunError


def write_sharded(folder: Path, state: dict[str, Tensor]) -> None:
    """Write this rank's part into `folder`; called by all ranks at once. Files are synced to disk."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True))


def sharded_names(folder: Path) -> set[str]:
    """Names of the tensors in `folder`."""
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def read_sharded(folder: Path, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state`, whole ones or parts, from `folder`, however many ranks wrote it.

    Raises RunError when it is incomplete.
    """
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:
        causes = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise RunError(f"Cannot read the optimizer state in {folder}: {causes}", "Use another checkpoint.") from error
