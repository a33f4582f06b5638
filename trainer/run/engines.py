"""The engines of a run on Ray: each in an actor, behind one router in an actor of its own."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any, Literal

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.integrations.models.folder.folder import loading
from cotune.records.policies import Policies
from cotune.sampling.protocol import Sampler
from cotune.trainer.config.cluster import CPUS, ClusterConfig
from cotune.trainer.config.train import TrainConfig

Kind = Literal["lora", "full"]

POLICIES = 4
"""How many policies a vLLM engine makes room for where the number of roles is not known before the run."""
SHARED = 0.5
"""Part of a GPU's memory that an engine takes beside a learner, while it is awake."""
_ROUTER = "cotune.trainer.run.engines:open_router"
_FACTORIES = {
    "vllm": "cotune.integrations.models.vllm.engine:VllmSampler.open",
    "vllm-url": "cotune.integrations.models.vllm.http:VllmHttpSampler.open",
    "transformers": "cotune.integrations.models.transformers.sampler:TransformersSampler.open",
}


async def start_engines(config: TrainConfig, model: str, weights: Kind) -> RaySampler:
    """Start a router's actor, which starts its engines; returns when enough of them serve.

    Raises ConfigError, EngineLost.
    """
    cluster = config.cluster
    vocabulary = await asyncio.to_thread(_vocabulary, model)
    arguments = {
        "cluster": msgspec.to_builtins(cluster),
        "engine": engine_arguments(config, model, weights),
        "vocabulary": vocabulary,
    }
    return await start_sampler(_ROUTER, arguments, num_cpus=0, env=cluster.env)


def first_weights(config: TrainConfig) -> Kind:
    """What the engines serve that are started before the roles, and so the policies of a layout, are known."""
    kinds = {policy.kind for policy in config.policy} if config.policy else {config.policies}
    return "full" if "full" in kinds and not kinds & {"lora", "shared"} else "lora"


def owners(config: TrainConfig, policies: Policies) -> tuple[list[str], bool]:
    """Policies that need engines of their own, as vLLM holds the full weights of one only; and whether others are
    left. Raises ConfigError where engines cannot serve them."""
    if config.cluster.engine != "vllm":
        return [], True
    kinds = {spec.name: spec.kind for spec in policies.specs.values()}
    full = [name for name, kind in kinds.items() if kind == "full"]
    rest = any(kind in ("lora", "frozen") for kind in kinds.values())
    if config.cluster.colocate and len(full) + rest > 1:
        raise ConfigError("cluster.colocate", True, f"must be false, where {', '.join(full)} need engines of their own")
    return full, rest


async def open_router(cluster: dict[str, Any], engine: dict[str, Any], vocabulary: int) -> RoutedSampler:
    """Start all engines and route over them; runs in the router's actor."""
    config = msgspec.convert(cluster, ClusterConfig)
    make = functools.partial(_engine, config, engine)
    return await RoutedSampler.open(
        [make] * config.engines,
        health_timeout=config.engine_timeout,
        vocabulary=vocabulary,
    )


def engine_arguments(config: TrainConfig, model: str, weights: Kind) -> dict[str, Any]:
    """What an engine of this run is opened with. Raises ConfigError for what it cannot serve."""
    cluster = config.cluster
    if cluster.engine == "transformers":
        kept = config.sampling.prefix_bytes()
        own = {"model": model, "threads": config.sampling.threads, "host": "thread", "prefix_cache": kept}
        return {**own, **cluster.engine_args}
    specs = [p.lora for p in config.policy if p.kind == "lora"] or [config.lora]
    rank = max(spec.rank for spec in specs)
    if cluster.engine == "vllm-url":
        kinds: list[str] = [p.kind for p in config.policy]
        if "full" in (kinds or [config.policies]):
            raise ConfigError(
                "policies", "full", "must be lora or shared, where a vLLM server samples: it takes adapters only"
            )
        key = os.environ.get("VLLM_API_KEY")
        return {
            "model": model, "url": cluster.engine_url, "api_key": key, "max_lora_rank": rank, **cluster.engine_args
        }  # fmt: skip
    if cluster.engine != "vllm":
        return {"model": model, **cluster.engine_args}
    parallel = {"tensor_parallel_size": cluster.gpus_per_engine} if cluster.gpus_per_engine > 1 else {}
    engine_args: dict[str, Any] = {**parallel, **cluster.engine_args}
    arguments: dict[str, Any] = {"model": model, "staleness": config.ahead, "engine_args": engine_args}
    if cluster.colocate:
        shared = {"gpu_memory_utilization": SHARED, **engine_args}
        arguments |= {"sleeps": True, "engine_args": shared if cluster.gpus_per_engine else cluster.engine_args}
    if weights == "full":
        if config.ahead:
            raise ConfigError(
                "mode",
                config.mode,
                "must be sync, where vLLM serves full weights: it holds one version only",
                'Train adapters (--policies lora), or set cluster.engine = "transformers".',
            )
        return {**arguments, "weights": "full"}
    return {**arguments, "policies": policy_count(config), "max_lora_rank": rank}


def policy_count(config: TrainConfig) -> int:
    """How many adapters are trained, as far as the configuration tells; else a few."""
    if config.policy:
        return max(1, sum(p.kind == "lora" for p in config.policy))
    return 1 if config.policies == "shared" else max(len(config.roles), POLICIES)


def _vocabulary(model: str) -> int:
    """How many token ids the model has."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model, **loading()).get_text_config().vocab_size)


async def _engine(config: ClusterConfig, arguments: dict[str, Any]) -> Sampler:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    return await start_sampler(
        _FACTORIES.get(config.engine, config.engine),
        arguments,
        num_cpus=CPUS,
        num_gpus=config.gpu_shares[0],
        env={**quiet, **({} if config.gpus_per_engine else {"OMP_NUM_THREADS": "1"}), **config.env},
    )
