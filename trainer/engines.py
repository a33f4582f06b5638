"""The engines of a run on Ray: each in an actor, behind one router in an actor of its own."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from cotune.integrations.ray_sampler import RaySampler, start_sampler
from cotune.integrations.router_settings import RouterSettings
from cotune.integrations.sampler_router import RoutedSampler
from cotune.policies import LoraSpec
from cotune.sampler import Sampler
from cotune.trainer.cluster_config import ClusterConfig
from cotune.trainer.config import TrainConfig

ADAPTERS = 8
"""Adapters that a vLLM engine holds in one batch where the number of policies is not known before the run."""
_ROUTER = "cotune.trainer.engines:open_router"
_FACTORIES = {
    "vllm": "cotune.integrations.vllm_engine:VllmSampler.open",
    "transformers": "cotune.integrations.transformers_sampler:TransformersSampler.open",
}


async def start_engines(config: TrainConfig, model: str) -> RaySampler:
    """Start the router's actor, which starts the engines; returns when enough of them serve.

    Raises ConfigError, EngineLost.
    """
    cluster = config.cluster
    arguments = {"model": model, "cluster": msgspec.to_builtins(cluster), "engine": engine_arguments(config, model)}
    return await start_sampler(_ROUTER, arguments, num_cpus=0, env=cluster.env)


async def open_router(model: str, cluster: dict[str, Any], engine: dict[str, Any]) -> RoutedSampler:
    """Start all engines and route over them; runs in the router's actor."""
    config = msgspec.convert(cluster, ClusterConfig)
    make = functools.partial(_engine, config, engine)
    settings = RouterSettings(
        min_healthy=config.min_engines, max_restarts=config.engine_restarts, health_timeout=config.engine_timeout
    )
    return await RoutedSampler.open([make] * config.engines, settings)


def engine_arguments(config: TrainConfig, model: str) -> dict[str, Any]:
    """What an engine of this run is opened with."""
    cluster = config.cluster
    if cluster.engine == "transformers":
        return {"model": model, "threads": config.sampling.threads, "host": "thread", **cluster.engine_args}
    specs = [policy.lora.spec() for policy in config.policy if policy.kind == "lora"]
    if not config.policy and config.policies != "full":
        specs = [config.lora.spec()]
    return {
        "model": model,
        "lora_rank": max((spec.rank for spec in specs), default=0),
        "max_loras": adapters(config, specs),
        "tensor_parallel": max(1, cluster.gpus_per_engine),
        "engine_args": dict(cluster.engine_args),
    }


def adapters(config: TrainConfig, specs: list[LoraSpec]) -> int:
    """How many adapter versions may be asked for at once: of each policy those that rollouts still use, and the one
    that is being published."""
    if not specs:
        return 0
    policies = len(specs) if config.policy else 1 if config.policies == "shared" else len(config.roles)
    return policies * (config.ahead + 1) + 1 if policies else ADAPTERS


async def _engine(config: ClusterConfig, arguments: dict[str, Any]) -> Sampler:
    env = {"OMP_NUM_THREADS": str(max(1, int(config.cpus_per_engine))), **config.env}
    return await start_sampler(
        _FACTORIES[config.engine],
        arguments,
        num_cpus=config.cpus_per_engine,
        num_gpus=config.gpus_per_engine,
        env=env if not config.gpus_per_engine else dict(config.env),
    )
