"""Copies between the host's memory and a model's device for which the host does not wait.

An ordinary copy waits until a GPU has done all work before it, and the host could not queue more work meanwhile.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: Tensor | npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a tensor or an array of the CPU to `device`, without waiting for a GPU. The original may be changed or freed
    afterwards, if `device` is a GPU."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda":
        # CUDA may wait before it copies more than 64 KiB from ordinary memory. torch keeps the pinned memory until the
        # copy is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def begin_copy_to_host(tensor: Tensor) -> Tensor:
    """Begin to copy a tensor to the CPU. The result has its values after the next `wait_for_copies`."""
    return tensor.to("cpu", non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait until everything queued on a device is done, also the copies of `begin_copy_to_host`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
