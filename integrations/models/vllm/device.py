"""What vLLM computes on: it was built for GPUs, or for the CPU."""

from __future__ import annotations

from cotune.errors import ConfigError


def on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def has_bfloat16() -> bool:
    """Whether the GPU multiplies bfloat16. vLLM refuses to start with it on others, such as a T4."""
    import torch
    from vllm.platforms import current_platform

    return torch.bfloat16 in current_platform.supported_dtypes


def check_gpu(gpus: int = 0) -> None:
    """Compare what vLLM was built for with the GPUs that it is given, of which the run asked for `gpus`.

    Raises ConfigError if vLLM was built for GPUs and this process has none, as it would fail later and not say why, and
    if it was built for the CPU and GPUs were asked for, as it would leave them idle.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike() and not torch.cuda.is_available():
        raise ConfigError(
            "engine",
            "vllm",
            "was built for GPUs, and torch can use none here",
            'Set engine = "transformers".',
        )
    if current_platform.is_cpu() and gpus:
        remedy = 'Install vLLM\'s build for GPUs, or set engine = "transformers".'
        raise ConfigError("engine", "vllm", f"was built for the CPU, and the run has {gpus} GPU for it", remedy)
