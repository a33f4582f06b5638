"""Copies from the machine's memory to the learner's device that do not wait for the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: Tensor | npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a tensor or an array of the CPU to `device`, without waiting for a GPU to compute.

    An ordinary copy waits until the GPU has done all work before it, and the host could not prepare the next pass
    meanwhile. When this returns, CUDA has read the CPU's memory, which may then be changed or freed.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.to(device, non_blocking=True)
