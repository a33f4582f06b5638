"""The engines that sample, by name. A new engine needs a file and a row of `ENGINES`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from cotune.sampling.protocol import Sampler
from cotune.user_objects import load_object

EngineWeights = Literal["lora", "full"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a sampler. An engine ignores settings that do not apply to it."""

    model: str
    """Folder or Hugging Face id."""
    engine: str = "transformers"
    """A name in `ENGINES`, or module:function of an async function that takes `model` and `arguments`."""
    arguments: dict[str, Any] = {}
    """Further arguments, passed to the engine unchanged."""
    url: str = ""
    api_key: str | None = None
    gpus: int = 0
    threads: int | None = None
    prefix_cache: int | None = None
    """Bytes."""
    dtype: str | None = None
    """Precision of the in-process engine: a torch name."""
    weights: EngineWeights = "lora"
    policies: int = 1
    """Number of adapters that are served at once, each in versions up to `staleness` steps apart."""
    staleness: int = 0
    max_lora_rank: int = 1
    sequences: int = 0
    """Number of candidates that the run requests from this engine at once; 0 if unknown."""
    sleeps: bool = False
    """Whether it shares its GPU with a learner."""
    alone: bool = False
    """Whether nothing else runs in this process."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of engine: the module:function that opens it from an `EngineConfig`, and its abilities."""

    open: str
    extra: str = ""
    """The extra of cotune that installs it."""
    fixed: bool = False
    """Whether it reserves memory for its policies at its start: for a number of adapters, or for one version of one
    policy's full weights."""
    adapters_only: bool = False
    by_url: bool = False
    """Whether it is a running server with an address."""
    sleeps: bool = False
    """Whether it can free its GPU while a learner works."""


SERVER = "vllm-url"
"""The row of a vLLM server that runs already. A run names it by its address."""
ENGINES = {
    "transformers": Engine(open="cotune.integrations.models.transformers.sampler:open_engine"),
    "vllm": Engine(open="cotune.integrations.models.vllm.opening:open_engine", extra="vllm", fixed=True, sleeps=True),
    SERVER: Engine(open="cotune.integrations.models.vllm.opening:open_server", adapters_only=True, by_url=True),
}


def engine_name(engine: str) -> str:
    """The name of an engine's row in `ENGINES`. A run names a server by its address."""
    return SERVER if engine.startswith(("http://", "https://")) else engine


def engine_of(engine: str) -> Engine:
    """The row of an engine. An engine of the user, module:function, is assumed to serve all kinds of policies."""
    name = engine_name(engine)
    return ENGINES.get(name) or Engine(open=name)


def products_dtype(dtype: str | None) -> str | None:
    """The precision for sampling in process from adapters that were trained in `dtype`.

    It is bfloat16 for bfloat16, on processors that can multiply it; otherwise None, the engine's default.
    """
    if dtype != "bfloat16":
        return None
    from cotune.integrations.models.bfloat16 import has_bfloat16

    return dtype if has_bfloat16() else None


async def open_sampler(config: EngineConfig) -> Sampler:
    """Open an engine. Raises ConfigError, and the errors of the engine."""
    opener: Callable[..., Awaitable[Sampler]] = load_object("engine", engine_of(config.engine).open, "my_engine:open")
    if config.engine in ENGINES:
        return await opener(config)
    return await opener(model=config.model, **config.arguments)
