"""torch's profiler, for `cotune train --profile`: one trace of this process at a time."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity


def begin() -> torch.profiler.profile:
    """Record the operators of all threads of this process, and the kernels of its GPUs. torch takes one profiler at a
    time, so `end` the earlier one first. Raises RuntimeError."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it reports each trace on standard error
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # By default torch records only the thread that starts it. An engine of this process computes in another one.
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = torch.profiler.profile(activities=activities, experimental_config=all_threads)
    profiler.start()
    return profiler


def end(profiler: torch.profiler.profile, file: Path | None) -> None:
    """Write the trace since `begin` to a file that ends with .json.gz; without a file, discard it.

    Raises RuntimeError and OSError.
    """
    profiler.stop()
    if file is not None:
        file.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(file))
