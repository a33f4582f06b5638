"""vLLM's two engines as rows of `models.engines`: one that is started here, and a server that runs already."""

from __future__ import annotations

from cotune.integrations.models.engines import EngineConfig
from cotune.integrations.models.vllm.device import check_gpu
from cotune.integrations.models.vllm.engine import VllmSampler, check_installed, prepare
from cotune.integrations.models.vllm.http import VllmHttpSampler
from cotune.sampling.protocol import Sampler

SHARED = 0.5
"""Part of a GPU's memory that an engine takes beside a learner, while it is awake."""


async def open_engine(config: EngineConfig) -> Sampler:
    """An engine of this machine: in this process if it has nothing else to do, otherwise in a child process.

    See `VllmSampler.open`. Raises ConfigError, SamplerError.
    """
    if not config.alone:
        from cotune.integrations.models.vllm.process import start_vllm_process

        check_installed()
        return await start_vllm_process(config)
    prepare()
    check_gpu(config.gpus)
    parallel = {"tensor_parallel_size": config.gpus} if config.gpus > 1 else {}
    shared = {"gpu_memory_utilization": SHARED} if config.sleeps and config.gpus else {}
    return await VllmSampler.open(
        config.model,
        weights=config.weights,
        policies=config.policies,
        staleness=config.staleness,
        max_lora_rank=config.max_lora_rank,
        sequences=config.sequences,
        sleeps=config.sleeps,
        engine_args={**parallel, **shared, **config.arguments},
    )


async def open_server(config: EngineConfig) -> VllmHttpSampler:
    """A server by its address; see `VllmHttpSampler.open`."""
    own = {"api_key": config.api_key, "max_lora_rank": config.max_lora_rank, **config.arguments}
    return await VllmHttpSampler.open(config.url, config.model, **own)
