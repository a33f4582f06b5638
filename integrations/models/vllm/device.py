"""What vLLM computes on: it was built for GPUs, or for the CPU."""

from __future__ import annotations

from cotune.errors import ConfigError


def on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def check_gpu() -> None:
    """Raises ConfigError where vLLM was built for GPUs and this process is given none: it would fail later, and not say
    why."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike() and not torch.cuda.is_available():
        raise ConfigError(
            "cluster.gpus_per_engine",
            0,
            "gives this vLLM no GPU that torch can use, and it was built for GPUs",
            'Set it, or sample with cluster.engine = "transformers".',
        )
