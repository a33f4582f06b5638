"""Opens vLLM's two engines for `models.engines`: one that cotune starts, and a running server."""

from __future__ import annotations

from typing import Any

from cotune.integrations.models.engines import EngineConfig
from cotune.integrations.models.vllm.device import check_gpu
from cotune.integrations.models.vllm.engine import VllmSampler, check_installed, prepare_environment
from cotune.integrations.models.vllm.http import VllmHttpSampler
from cotune.sampling.protocol import Sampler

SHARED = 0.5
"""The fraction of a GPU's memory that an awake engine takes if it shares the GPU with a learner."""


async def open_engine(config: EngineConfig) -> Sampler:
    """Start an engine on this machine, in this process if it is only there for the engine, or else in a child process.

    See `VllmSampler.open`. Raises ConfigError, SamplerError.
    """
    if not config.alone:
        from cotune.integrations.models.vllm.process import start_vllm_process

        check_installed()
        return await start_vllm_process(config)
    prepare_environment()
    check_gpu(config.gpus)
    # cotune's arguments of vLLM, which the user's (`config.arguments`) replace.
    arguments: dict[str, Any] = {}
    if config.gpus > 1:
        arguments["tensor_parallel_size"] = config.gpus
    if config.sleeps and config.gpus:
        arguments["gpu_memory_utilization"] = SHARED
    return await VllmSampler.open(
        config.model,
        weights=config.weights,
        policies=config.policies,
        staleness=config.staleness,
        max_lora_rank=config.max_lora_rank,
        sequences=config.sequences,
        sleeps=config.sleeps,
        engine_args={**arguments, **config.arguments},
    )


async def open_server(config: EngineConfig) -> VllmHttpSampler:
    """Connect to a server at its address; see `VllmHttpSampler.open`."""
    options = {"api_key": config.api_key, "max_lora_rank": config.max_lora_rank, **config.arguments}
    return await VllmHttpSampler.open(config.url, config.model, **options)
