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
from cotune.integrations.models.folder.folder import count_token_ids, loading_options, locate_model, read_tokenizer
from cotune.integrations.models.per_policy import PolicySampler, open_engines
from cotune.records.policies import Policies, PolicySpec
from cotune.sampling.protocol import Sampler
from cotune.tables import plural
from cotune.trainer.config.engine import engine_kind, engine_shares_gpu, engine_sleeps, engine_urls

POLICIES = 4
"""Number of policies that an engine makes room for if the number of roles is not known before the run."""
_ROUTER = "cotune.trainer.run.engines:open_router"
_OPEN = f"{open_sampler.__module__}:{open_sampler.__name__}"


class EngineSet(msgspec.Struct, frozen=True):
    """Engines that serve the same weights: adapters and untrained policies on one base model, or the full weights of
    one policy, if an engine cannot hold the weights of several."""

    model: str
    """The base model."""
    weights: EngineWeights = "lora"
    policies: tuple[str, ...] = ()
    """The policies that the engines serve, if they are known."""

    def __str__(self) -> str:
        return self.policies[0] if self.weights == "full" and self.policies else self.model


def engine_sets(config: TrainConfig, policies: Policies) -> list[EngineSet]:
    """Return the sets of engines that a run needs; the run's own model comes first. Raises ConfigError if it needs
    several sets and cannot have them."""
    bases = policies.bases(config.model)
    sets: list[EngineSet] = []
    for model, names in bases.items():
        # A policy of full weights needs engines of its own if an engine holds the weights of one policy only.
        with_own_engines: list[str] = []
        if engine_kind(config).fixed:
            with_own_engines = [name for name in names if policies.specs[name].kind == "full"]
        on_shared_engines = tuple(name for name in names if name not in with_own_engines)
        sets += [EngineSet(model, "full", (name,)) for name in with_own_engines]
        # A model without any policy yet has engines too, for its untrained weights.
        if on_shared_engines or not with_own_engines:
            sets.append(EngineSet(model, "lora", on_shared_engines))

    fault = f"cannot be used here: {', '.join(str(engine_set) for engine_set in sets)} need separate engines"
    if len(sets) > 1 and engine_shares_gpu(config):
        remedy = 'Set engine = "transformers": a GPU has room for one vLLM engine next to the learner.'
        raise ConfigError("engine", config.engine, fault, remedy)
    # Without Ray there is one engine for each base model.
    if len(sets) > len(bases) and not config.cluster.on_ray:
        raise ConfigError("engine", config.engine, fault, 'Set cluster.address = "local".')
    return sets


def first_sets(config: TrainConfig) -> list[EngineSet]:
    """Return the engine sets to start before the roles are known. If there are no [[policy]] tables, the policies are
    not known then either, and there is one set for the run's model."""
    if config.policy:
        return engine_sets(config, Policies(config.specs, {}))
    has_full_weights = config.policies == "full" and engine_kind(config).fixed
    return [EngineSet(config.model, "full" if has_full_weights else "lora")]


def join_samplers(config: TrainConfig, engines: Sequence[tuple[EngineSet, Sampler]]) -> Sampler:
    """Join the samplers of all sets into one, which sends each request to the sampler of its policy. Policies that no
    set names are answered on the run's own model."""
    if len(engines) == 1:
        [(_, sampler)] = engines
        return sampler
    sampler_of_policy: dict[str, Sampler] = {}
    default_samplers: dict[EngineWeights, Sampler] = {}  # on the run's own model, the first of each kind of weights
    for engine_set, sampler in engines:
        sampler_of_policy |= dict.fromkeys(engine_set.policies, sampler)
        if engine_set.model == config.model:
            default_samplers.setdefault(engine_set.weights, sampler)
    # Rather an engine of adapters, which also serves the untrained base model.
    default = default_samplers.get("lora")
    if default is None:
        default = next(iter(default_samplers.values()))
    return PolicySampler(sampler_of_policy, default)


async def open_in_process(config: TrainConfig) -> Sampler:
    """Open the engines of a run without Ray, one for each base model. Raises ConfigError."""
    urls = await server_urls(config)
    sets = {engine_set.model: engine_set for engine_set in first_sets(config)}
    return await open_engines(config.bases, lambda model: engine_config(config, sets[model], urls.get(model, "")))


async def start_engines(config: TrainConfig, engine_set: EngineSet, url: str = "") -> RaySampler:
    """Start a router's actor, which starts the engines of a set; returns when enough of them serve.

    Raises ConfigError, EngineLost.
    """
    engine = engine_config(config, engine_set, url)
    engine = msgspec.structs.replace(engine, model=str(locate_model(engine_set.model)))
    vocabulary = await asyncio.to_thread(_vocabulary, engine.model)
    arguments = {"cluster": config.cluster, "engine": engine, "vocabulary": vocabulary}
    return await start_sampler(_ROUTER, arguments, num_cpus=0, env=config.cluster.env)


async def server_urls(config: TrainConfig) -> dict[str, str]:
    """Return the address of the server of each base model. A single server is only checked when it is opened. Raises
    ConfigError."""
    urls = engine_urls(config.engine)
    bases = list(config.bases)
    if not urls:
        return {}
    if len(urls) != len(bases):
        fault = f"names {plural(len(urls), 'server')} for {plural(len(bases), 'base model')}: {', '.join(bases)}"
        raise ConfigError("engine", config.engine, fault, "Name one server for each base model.")
    if len(urls) == 1:
        return {bases[0]: urls[0]}
    from cotune.integrations.models.vllm.http import find_servers

    return await find_servers(urls, bases, os.environ.get("VLLM_API_KEY"))


async def open_router(cluster: ClusterConfig, engine: EngineConfig, vocabulary: int) -> RoutedSampler:
    """Start all engines, and return a sampler that distributes requests over them. This runs in the router's actor."""
    start_one = functools.partial(start_engine, cluster, engine)
    return await RoutedSampler.open([start_one] * cluster.engines, vocabulary=vocabulary)


def engine_config(config: TrainConfig, engine_set: EngineSet, url: str = "") -> EngineConfig:
    """Return the configuration of an engine of a set. `url` is the address of its server, if it has one. Raises
    ConfigError for weights that the engine cannot serve."""
    engine = engine_kind(config)
    policy_kinds: list[str] = [config.policies]
    if config.policy:
        policy_kinds = [policy.kind for policy in config.policy]
    if engine.adapters_only and "full" in policy_kinds:
        fault = f"cannot be sampled by {config.engine}: it takes adapters only"
        raise ConfigError("policies", "full", fault)
    if engine.fixed and engine_set.weights == "full" and config.ahead:
        fault = f"cannot be used if {config.engine} serves full weights: it holds one version only"
        remedy = 'Train adapters (--policies lora), or set engine = "transformers".'
        raise ConfigError("mode", config.mode, fault, remedy)

    # For adapters in this process, the engine multiplies in the learner's precision, so that both agree.
    dtype = None
    if "full" not in policy_kinds and not config.cluster.on_ray:
        dtype = products_dtype(config.learner.precision)
    # The largest rank that the engine must have room for: without [[policy]] tables all adapters have the run's own.
    ranks = [spec.lora.rank for spec in _adapters(config, engine_set.model)]
    return EngineConfig(
        model=engine_set.model,
        engine=engine_name(config.engine),
        arguments=config.engine_args,
        url=url,
        api_key=os.environ.get("VLLM_API_KEY") if engine.by_url else None,
        gpus=math.ceil(config.cluster.gpus_per_engine),
        prefix_cache=config.sampling.prefix_bytes,
        dtype=dtype,
        weights=engine_set.weights,
        policies=policy_count(config, engine_set.model),
        staleness=config.ahead,
        max_lora_rank=max(ranks, default=config.lora.spec.rank),
        sequences=sequences_at_once(config),
        sleeps=engine_sleeps(config),
        alone=config.cluster.on_ray,
    )


def sequences_at_once(config: TrainConfig) -> int:
    """Return the number of candidates that one engine draws at once, if every running episode makes one call."""
    candidates = config.episodes_at_once * candidates_of_call(config)
    return math.ceil(candidates / max(1, config.cluster.engines))


def candidates_of_call(config: TrainConfig) -> int:
    """Return the number of candidates that an engine draws for one call."""
    return 1 if config.plan.kind == "independent" else config.largest_k


def policy_count(config: TrainConfig, model: str) -> int:
    """Return the number of trained adapters on a base model. Before the roles are known, it is at least `POLICIES`."""
    if config.policy:
        return max(1, len(_adapters(config, model)))
    return 1 if config.policies == "shared" else max(len(config.roles), POLICIES)


def _adapters(config: TrainConfig, model: str) -> list[PolicySpec]:
    """Return the adapters on a base model that [[policy]] tables name."""
    return [spec for spec in config.specs.values() if spec.kind == "lora" and (spec.model or config.model) == model]


def _vocabulary(model: str) -> int:
    """Return the number of token ids that the model may draw."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, **loading_options())
    return count_token_ids(read_tokenizer(model), config.get_text_config().vocab_size)


async def start_engine(cluster: ClusterConfig, engine: EngineConfig) -> Sampler:
    """Start one engine in a separate actor."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR"}
    if not cluster.gpus_per_engine:
        env["OMP_NUM_THREADS"] = "1"  # engines on the CPU share its cores
    return await start_sampler(
        _OPEN,
        {"config": engine},
        num_cpus=CPUS,
        num_gpus=cluster.gpus_per_engine,
        env={**env, **cluster.env},
    )
