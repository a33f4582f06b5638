"""The engines of a run: one on this machine, or several on Ray, each in an actor, behind a router in another."""

from __future__ import annotations

import asyncio
import functools
import os

from cotune.errors import ConfigError
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.integrations.models.engines import EngineConfig, EngineWeights, open_sampler
from cotune.integrations.models.folder.folder import loading
from cotune.integrations.models.per_policy import open_engines
from cotune.records.policies import Policies
from cotune.sampling.protocol import Sampler
from cotune.trainer.config.cluster import CPUS, ClusterConfig
from cotune.trainer.config.train import TrainConfig

POLICIES = 4
"""How many policies an engine makes room for where the number of roles is not known before the run."""
_ROUTER = "cotune.trainer.run.engines:open_router"
_OPEN = f"{open_sampler.__module__}:{open_sampler.__name__}"


async def open_in_process(config: TrainConfig) -> Sampler:
    """The engines of a run without Ray, one for each base model. Raises ConfigError."""
    return await open_engines(config.bases, lambda model: engine_config(config, model, first_weights(config)))


async def start_engines(config: TrainConfig, model: str, weights: EngineWeights) -> RaySampler:
    """Start a router's actor, which starts its engines; returns when enough of them serve.

    Raises ConfigError, EngineLost.
    """
    vocabulary = await asyncio.to_thread(_vocabulary, model)
    cluster = config.cluster
    arguments = {"cluster": cluster, "engine": engine_config(config, model, weights), "vocabulary": vocabulary}
    return await start_sampler(_ROUTER, arguments, num_cpus=0, env=cluster.env)


def first_weights(config: TrainConfig) -> EngineWeights:
    """What the engines serve that are started before the roles, and so the policies of a layout, are known."""
    kinds = {policy.kind for policy in config.policy} if config.policy else {config.policies}
    return "full" if "full" in kinds and not kinds & {"lora", "shared"} else "lora"


def owners(config: TrainConfig, policies: Policies) -> tuple[list[str], bool]:
    """Policies that need engines of their own, as an engine may hold the full weights of one only; and whether others
    are left. Raises ConfigError where engines cannot serve them."""
    cluster = config.cluster
    if not cluster.kind.fixed:
        return [], True
    kinds = {spec.name: spec.kind for spec in policies.specs.values()}
    full = [name for name, kind in kinds.items() if kind == "full"]
    rest = any(kind in ("lora", "frozen") for kind in kinds.values())
    if len(full) + rest > 1:
        fault = f"cannot be used here: {', '.join(full)} need engines of their own"
        if cluster.colocate:
            raise ConfigError("cluster.colocate", True, fault)
        if not cluster.address:
            raise ConfigError("cluster.engine", cluster.engine, fault, 'Set cluster.address = "local".')
    return full, rest


async def open_router(cluster: ClusterConfig, engine: EngineConfig, vocabulary: int) -> RoutedSampler:
    """Start all engines and route over them; runs in the router's actor."""
    make = functools.partial(_engine, cluster, engine)
    return await RoutedSampler.open(
        [make] * cluster.engines, health_timeout=cluster.engine_timeout, vocabulary=vocabulary
    )


def engine_config(config: TrainConfig, model: str, weights: EngineWeights) -> EngineConfig:
    """What an engine of this run is opened with. Raises ConfigError for weights that it cannot serve."""
    cluster, engine = config.cluster, config.cluster.kind
    kinds: list[str] = [p.kind for p in config.policy] or [config.policies]
    if engine.adapters_only and "full" in kinds:
        fault = f"cannot be sampled by {cluster.sampled_by}: it takes adapters only"
        raise ConfigError("policies", "full", fault)
    if engine.fixed and weights == "full" and config.ahead:
        fault = f"cannot be used if {cluster.sampled_by} serves full weights: it holds one version only"
        remedy = 'Train adapters (--policies lora), or set cluster.engine = "transformers".'
        raise ConfigError("mode", config.mode, fault, remedy)
    specs = [p.lora for p in config.policy if p.kind == "lora"] or [config.lora]
    return EngineConfig(
        model=model,
        engine=cluster.sampled_by,
        arguments=cluster.engine_args,
        url=cluster.engine_url,
        api_key=os.environ.get("VLLM_API_KEY") if engine.by_url else None,
        gpus=cluster.gpus_per_engine,
        threads=config.sampling.threads,
        prefix_cache=config.sampling.prefix_bytes(),
        weights=weights,
        policies=policy_count(config),
        staleness=config.ahead,
        max_lora_rank=max(spec.rank for spec in specs),
        sleeps=cluster.colocate,
        alone=bool(cluster.address),
    )


def policy_count(config: TrainConfig) -> int:
    """How many adapters are trained, as far as the configuration tells; else a few."""
    if config.policy:
        return max(1, sum(p.kind == "lora" for p in config.policy))
    return 1 if config.policies == "shared" else max(len(config.roles), POLICIES)


def _vocabulary(model: str) -> int:
    """How many token ids the model has."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model, **loading()).get_text_config().vocab_size)


async def _engine(cluster: ClusterConfig, engine: EngineConfig) -> Sampler:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    return await start_sampler(
        _OPEN,
        {"config": engine},
        num_cpus=CPUS,
        num_gpus=cluster.gpu_shares[0],
        env={**quiet, **({} if cluster.gpus_per_engine else {"OMP_NUM_THREADS": "1"}), **cluster.env},
    )
