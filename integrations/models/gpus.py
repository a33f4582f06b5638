"""GPUs of this machine that torch cannot use."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def unused_gpus(driver: Path = _NVIDIA) -> list[str]:
    """Names of NVIDIA GPUs that the driver has, while torch has none. Empty where this process is to use none."""
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available() or not driver.is_dir():
        return []
    names = []
    for described in sorted(driver.glob("*/information")):
        fields = dict(line.split(":", 1) for line in described.read_text().splitlines() if ":" in line)
        names.append(fields.get("Model", "GPU").strip())
    return names


@cache
def warn_of_unused_gpus() -> None:
    """Log once that this machine has GPUs which torch cannot use, and why."""
    import torch

    if names := unused_gpus():
        why = "was built without CUDA" if torch.version.cuda is None else f"cannot use its CUDA {torch.version.cuda}"
        log.warning(
            "This machine has a GPU (%s), but the installed torch %s %s here, so everything runs on the CPU. Install a "
            "torch that fits the driver; `nvidia-smi` prints its CUDA version.",
            ", ".join(names),
            torch.__version__,
            why,
        )
