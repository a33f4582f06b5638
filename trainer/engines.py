"""The engines of a run on Ray: each in an actor, behind one router in an actor of its own."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.ray_sampler import RaySampler, start_sampler
from cotune.integrations.router_settings import RouterSettings
from cotune.integrations.sampler_router import RoutedSampler
from cotune.policies import Policies
from cotune.sampler import Sampler
from cotune.trainer.cluster_config import ClusterConfig
from cotune.trainer.config import TrainConfig

POLICIES = 4
"""How many policies a vLLM engine makes room for where the number of roles is not known before the run."""
SHARED = 0.5
"""Part of a GPU's memory that an engine takes beside a learner, while it is awake."""
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
    vocabulary = await asyncio.to_thread(_vocabulary, model)
    arguments = {
        "cluster": msgspec.to_builtins(cluster),
        "engine": engine_arguments(config, model),
        "vocabulary": vocabulary,
    }
    return await start_sampler(_ROUTER, arguments, num_cpus=0, env=cluster.env)


async def open_router(cluster: dict[str, Any], engine: dict[str, Any], vocabulary: int) -> RoutedSampler:
    """Start all engines and route over them; runs in the router's actor."""
    config = msgspec.convert(cluster, ClusterConfig)
    make = functools.partial(_engine, config, engine)
    settings = RouterSettings(
        min_healthy=config.min_engines,
        max_restarts=config.engine_restarts,
        health_timeout=config.engine_timeout,
        vocabulary=vocabulary,
    )
    return await RoutedSampler.open([make] * config.engines, settings)


def engine_arguments(config: TrainConfig, model: str) -> dict[str, Any]:
    """What an engine of this run is opened with. Raises ConfigError for policies that it cannot serve together."""
    cluster = config.cluster
    if cluster.engine == "transformers":
        return {"model": model, "threads": config.sampling.threads, "host": "thread", **cluster.engine_args}
    if cluster.engine != "vllm":
        return {"model": model, **cluster.engine_args}
    parallel = {"tensor_parallel_size": cluster.gpus_per_engine} if cluster.gpus_per_engine > 1 else {}
    arguments = {"model": model, "staleness": config.ahead, "engine_args": {**parallel, **cluster.engine_args}}
    if cluster.colocate:
        shared = {"gpu_memory_utilization": SHARED, **arguments["engine_args"]}
        arguments |= {"sleeps": True, "engine_args": shared if cluster.gpus_per_engine else cluster.engine_args}
    full = [p.name for p in config.policy if p.kind == "full"]
    if full and (len(full) > 1 or any(p.kind == "lora" for p in config.policy)):
        raise _one_full(", ".join(full))
    if full or (config.policies == "full" and not config.policy):
        if config.ahead:
            raise ConfigError(
                "mode",
                config.mode,
                "sync, where vLLM serves full weights: it holds one version only",
                'Train adapters (--policies lora), or set cluster.engine = "transformers".',
            )
        return {**arguments, "weights": "full"}
    specs = [p.lora.spec() for p in config.policy if p.kind == "lora"] or [config.lora.spec()]
    return {**arguments, "policies": policy_count(config), "max_lora_rank": max(spec.rank for spec in specs)}


def policy_count(config: TrainConfig) -> int:
    """How many adapters are trained, as far as the configuration tells; else a few."""
    if config.policy:
        return sum(p.kind == "lora" for p in config.policy)
    return 1 if config.policies == "shared" else max(len(config.roles), POLICIES)


def check_policies(config: TrainConfig, policies: Policies) -> None:
    """Raises ConfigError for policies that the engines cannot serve together."""
    full = [spec.name for spec in policies.specs.values() if spec.kind == "full"]
    if config.cluster.engine == "vllm" and len(full) > 1:
        raise _one_full(", ".join(full))


def _vocabulary(model: str) -> int:
    """How many token ids the model has."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)


def _one_full(names: str) -> ConfigError:
    return ConfigError(
        "policies",
        f"full for {names}",
        "one policy of full weights, as a vLLM engine holds one set of them",
        'Train adapters (--policies lora), or set cluster.engine = "transformers".',
    )


async def _engine(config: ClusterConfig, arguments: dict[str, Any]) -> Sampler:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    threads = {"OMP_NUM_THREADS": str(max(1, int(config.cpus_per_engine)))}
    return await start_sampler(
        _FACTORIES.get(config.engine, config.engine),
        arguments,
        num_cpus=config.cpus_per_engine,
        num_gpus=config.gpu_shares[0],
        env={**quiet, **({} if config.gpus_per_engine else threads), **config.env},
    )
