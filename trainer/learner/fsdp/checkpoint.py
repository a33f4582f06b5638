"""Optimizer states in parts: each rank writes its own as safetensors, any number of ranks reads them.

PyTorch's distributed checkpoint in the form of Hugging Face: its own form keeps a pickle, which runs code when read.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from cotune.errors import RunError


def write_sharded(folder: Path, state: dict[str, Tensor]) -> None:
    """Write this rank's part into `folder`; called by all ranks at once. Files are synced to disk. Raises OSError."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        raise OSError(f"{folder}: {_causes(error)}") from error


def sharded_names(folder: Path) -> set[str]:
    """Names of the tensors in `folder`."""
    return set(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def read_sharded(folder: Path, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state`, whole ones or parts, from `folder`, however many ranks wrote it.

    Raises RunError when it is incomplete.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    written = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        there = sum(chunk.sizes.numel() for chunk in written[name].chunks) if name in written else 0
        if there != tensor.numel():
            raise RunError(
                f"The optimizer state in {folder} is not whole: {there} of {tensor.numel()} values of {name}.",
                "Use another checkpoint.",
            )
    try:
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:
        raise RunError(
            f"Cannot read the optimizer state in {folder}: {_causes(error)}", "Use another checkpoint."
        ) from error


def _causes(error: dcp.api.CheckpointException) -> str:
    return "; ".join(str(failure[0]) for failure in error.failures.values())
