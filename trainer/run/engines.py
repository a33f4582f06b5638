"""The engines of a run: one on this machine, in a child process, or several on Ray behind a router."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Sequence

import msgspec

from cotune.config.cluster import CPUS, ClusterConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.integrations.models.engines import EngineConfig, EngineWeights, engine_name, open_sampler, products_dtype
from cotune.integrations.models.folder.folder import count_token_ids, loading, locate_model, read_tokenizer
from cotune.integrations.models.per_policy import PolicySampler, open_engines
from cotune.records.policies import Policies, PolicySpec
from cotune.sampling.protocol import Sampler
from cotune.tables import plural
from cotune.trainer.config.engine import engine_kind, engine_shares_gpu, engine_sleeps, engine_urls

POLICIES = 4
"""How many policies an engine makes room for where the number of roles is not known before the run."""
_ROUTER = "cotune.trainer.run.engines:open_router"
_OPEN = f"{open_sampler.__module__}:{open_sampler.__name__}"


class EngineSet(msgspec.Struct, frozen=True):
    """Engines that serve the same: adapters and untrained policies on one base `model`, or the full weights of one
    policy, where an engine holds no more."""

    model: str
    weights: EngineWeights = "lora"
    policies: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.policies[0] if self.weights == "full" and self.policies else self.model


def engine_sets(config: TrainConfig, policies: Policies) -> list[EngineSet]:
    """What the engines of a run serve, on the run's own model first. Raises ConfigError where they cannot."""
    fixed = engine_kind(config).fixed
    sets: list[EngineSet] = []
    for model, names in policies.bases(config.model).items():
        full = [name for name in names if fixed and policies.specs[name].kind == "full"]
        rest = tuple(name for name in names if name not in full)
        sets += [EngineSet(model, "full", (name,)) for name in full]
        sets += [EngineSet(model, "lora", rest)] if rest or not full else []
    fault = f"cannot be used here: {', '.join(str(one) for one in sets)} need engines of their own"
    if len(sets) > 1 and engine_shares_gpu(config):
        remedy = 'Set engine = "transformers": a GPU takes one engine of vLLM beside its learner.'
        raise ConfigError("engine", config.engine, fault, remedy)
    if len(sets) > len(policies.bases(config.model)) and not config.cluster.on_ray:
        raise ConfigError("engine", config.engine, fault, 'Set cluster.address = "local".')
    return sets


def first_sets(config: TrainConfig) -> list[EngineSet]:
    """`engine_sets` as far as they are known before the roles, and so the policies of a layout."""
    if config.policy:
        return engine_sets(config, Policies(config.specs, {}))
    return [EngineSet(config.model, "full" if config.policies == "full" and engine_kind(config).fixed else "lora")]


def joined(config: TrainConfig, engines: Sequence[tuple[EngineSet, Sampler]]) -> Sampler:
    """One sampler over those of all sets. Policies that none of them names are answered on the run's own model."""
    if len(engines) == 1:
        return engines[0][1]
    own = [(one.weights, sampler) for one, sampler in engines if one.model == config.model]
    rest = next((sampler for weights, sampler in own if weights == "lora"), own[0][1])
    return PolicySampler({name: sampler for one, sampler in engines for name in one.policies}, rest)


async def open_in_process(config: TrainConfig) -> Sampler:
    """The engines of a run without Ray, one for each base model. Raises ConfigError."""
    urls = await server_urls(config)
    sets = {one.model: one for one in first_sets(config)}
    return await open_engines(config.bases, lambda model: engine_config(config, sets[model], urls.get(model, "")))


async def start_engines(config: TrainConfig, one: EngineSet, url: str = "") -> RaySampler:
    """Start a router's actor, which starts the engines of a set; returns when enough of them serve.

    Raises ConfigError, EngineLost.
    """
    engine = engine_config(config, one, url)
    engine = msgspec.structs.replace(engine, model=str(locate_model(one.model)))
    vocabulary = await asyncio.to_thread(_vocabulary, engine.model)
    arguments = {"cluster": config.cluster, "engine": engine, "vocabulary": vocabulary}
    return await start_sampler(_ROUTER, arguments, num_cpus=0, env=config.cluster.env)


async def server_urls(config: TrainConfig) -> dict[str, str]:
    """The address of the server of each base model; of one alone it is checked as it is opened. Raises ConfigError."""
    urls, bases = engine_urls(config.engine), list(config.bases)
    if not urls:
        return {}
    if len(urls) != len(bases):
        fault = f"names {plural(len(urls), 'server')} for {plural(len(bases), 'base model')}: {', '.join(bases)}"
        raise ConfigError("engine", config.engine, fault, "Name one for each.")
    if len(urls) == 1:
        return {bases[0]: urls[0]}
    from cotune.integrations.models.vllm.http import find_servers

    return await find_servers(urls, bases, os.environ.get("VLLM_API_KEY"))


async def open_router(cluster: ClusterConfig, engine: EngineConfig, vocabulary: int) -> RoutedSampler:
    """Start all engines and route over them; runs in the router's actor."""
    make = functools.partial(start_engine, cluster, engine)
    return await RoutedSampler.open([make] * cluster.engines, vocabulary=vocabulary)


def engine_config(config: TrainConfig, one: EngineSet, url: str = "") -> EngineConfig:
    """What an engine of this run is opened with. Raises ConfigError for weights that it cannot serve."""
    engine = engine_kind(config)
    kinds: list[str] = [p.kind for p in config.policy] or [config.policies]
    if engine.adapters_only and "full" in kinds:
        fault = f"cannot be sampled by {config.engine}: it takes adapters only"
        raise ConfigError("policies", "full", fault)
    if engine.fixed and one.weights == "full" and config.ahead:
        fault = f"cannot be used if {config.engine} serves full weights: it holds one version only"
        remedy = 'Train adapters (--policies lora), or set engine = "transformers".'
        raise ConfigError("mode", config.mode, fault, remedy)
    specs = [spec.lora for spec in _adapters(config, one.model)] or [config.lora.spec]
    return EngineConfig(
        model=one.model,
        engine=engine_name(config.engine),
        arguments=config.engine_args,
        url=url,
        api_key=os.environ.get("VLLM_API_KEY") if engine.by_url else None,
        gpus=math.ceil(config.cluster.gpus_per_engine),
        prefix_cache=config.sampling.prefix_bytes,
        dtype=None if "full" in kinds or config.cluster.on_ray else _dtype(config),
        weights=one.weights,
        policies=policy_count(config, one.model),
        staleness=config.ahead,
        max_lora_rank=max(spec.rank for spec in specs),
        sequences=sequences_at_once(config),
        sleeps=engine_sleeps(config),
        alone=config.cluster.on_ray,
    )


def sequences_at_once(config: TrainConfig) -> int:
    """How many candidates one engine is asked for at once, if every episode in flight makes one call."""
    return -(-config.episodes_at_once * candidates_of_call(config) // max(1, config.cluster.engines))


def candidates_of_call(config: TrainConfig) -> int:
    """How many candidates an engine draws for one call."""
    return 1 if config.plan.kind == "independent" else config.plan.k


def _dtype(config: TrainConfig) -> str | None:
    """The in-process engine computes as the learner does, where both are on the CPU and that has bfloat16."""
    asked = config.learner.precision
    return asked if asked == "float32" and config.learner.device == "cpu" else products_dtype(asked)


def policy_count(config: TrainConfig, model: str) -> int:
    """How many adapters of a base are trained, as far as the configuration tells; else a few."""
    if config.policy:
        return max(1, len(_adapters(config, model)))
    return 1 if config.policies == "shared" else max(len(config.roles), POLICIES)


def _adapters(config: TrainConfig, model: str) -> list[PolicySpec]:
    """The adapters on a base that [[policy]] tables name."""
    return [spec for spec in config.specs.values() if spec.kind == "lora" and (spec.model or config.model) == model]


def _vocabulary(model: str) -> int:
    """How many token ids the model may draw."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, **loading())
    return count_token_ids(read_tokenizer(model), config.get_text_config().vocab_size)


async def start_engine(cluster: ClusterConfig, engine: EngineConfig) -> Sampler:
    """Start one engine in an actor of its own."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    return await start_sampler(
        _OPEN,
        {"config": engine},
        num_cpus=CPUS,
        num_gpus=cluster.gpus_per_engine,
        env={**quiet, **({} if cluster.gpus_per_engine else {"OMP_NUM_THREADS": "1"}), **cluster.env},
    )
