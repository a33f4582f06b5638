"""The devices of vLLM, which was built either for GPUs or for the CPU."""

from __future__ import annotations

from cotune.errors import ConfigError


def on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def has_bfloat16() -> bool:
    """Whether the GPU can multiply bfloat16. vLLM refuses to start with bfloat16 on other GPUs, for example a T4."""
    import torch
    from vllm.platforms import current_platform

    return torch.bfloat16 in current_platform.supported_dtypes


def check_gpu(gpus: int = 0) -> None:
    """Check that vLLM was built for the devices of this process. The run has requested `gpus` of them.

    Raises ConfigError if vLLM was built for GPUs and this process has none: vLLM would fail later without a clear
    reason. Raises it also if vLLM was built for the CPU and the run has requested GPUs, which would be idle.
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
