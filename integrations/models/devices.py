"""Where parts of a run compute: the default device and its CPU threads, its name in messages, and what is wrong with
GPUs that torch does not use."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

NVIDIA = Path("/proc/driver/nvidia/gpus")
AMD = Path("/dev/kfd")
"""Where the drivers of NVIDIA and of AMD show themselves on Linux."""


def usual_device() -> Literal["cuda", "cpu"]:
    """Where a part of a run computes if nothing else was asked for: the first GPU, or the CPU if there is none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def usual_threads(parameters: int) -> int:
    """CPU threads for a model of so many parameters: torch's own number if its passes are long enough to divide."""
    import torch

    from cotune.integrations.models.bfloat16 import LARGE

    return torch.get_num_threads() if parameters >= LARGE else 1


def device_name() -> str:
    """What messages call the usual device: `the CPU`, or the GPU with its model."""
    import torch

    return f"GPU 0 ({torch.cuda.get_device_name(0)})" if usual_device() == "cuda" else "the CPU"


def unused_gpu() -> str:
    """Why a GPU of this machine is not used, and advice; empty if the machine has none, or if torch uses it."""
    import torch

    if torch.cuda.is_available():
        return ""
    if sys.platform == "darwin":
        if not torch.backends.mps.is_available():
            return ""
        return "Apple's GPU is not used: cotune computes on the CPU here, for trials with small models."
    count = len(list(NVIDIA.iterdir())) if NVIDIA.is_dir() else 0
    if count:
        gpus = "a GPU of NVIDIA is" if count == 1 else f"{count} GPUs of NVIDIA are"
        return f"{gpus} in this machine, but {_why_unseen()}"
    if AMD.exists():
        build = "is built without ROCm" if torch.version.hip is None else "sees none"
        return f"an AMD GPU is in this machine, but torch {torch.__version__} {build}: install torch's build for ROCm."
    return ""


def untried_gpu() -> str:
    """What to know of an AMD GPU that torch uses; empty for other GPUs, and if there is none."""
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return ""
    return "AMD's GPUs run everything through torch's and vLLM's builds for ROCm, but nobody has tried it."


def _why_unseen() -> str:
    """Why torch does not see a GPU of NVIDIA."""
    import torch

    version = torch.__version__
    cuda_version = torch.version.cuda
    if cuda_version is None:
        return f"torch {version} is built without CUDA: install torch's build for CUDA."
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        return f"torch sees none: CUDA_VISIBLE_DEVICES is {visible_devices!r}."
    return f"torch {version} for CUDA {cuda_version} sees none: compare with the driver's version in nvidia-smi."
