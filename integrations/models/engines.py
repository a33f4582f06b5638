"""The engines that sample, by name. A new one takes a file of its own and a row of `ENGINES`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from cotune.sampling.protocol import Sampler
from cotune.user_objects import load_object

EngineWeights = Literal["lora", "full"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler is opened with. An engine ignores what it has no use for."""

    model: str
    """Folder or Hugging Face id."""
    engine: str = "transformers"
    """A name in `ENGINES`, or module:function of an async function that takes `model` and `arguments`."""
    arguments: dict[str, Any] = {}
    """Further arguments of the engine itself."""
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
    """Adapters that are served at once, each in versions up to `staleness` steps apart."""
    staleness: int = 0
    max_lora_rank: int = 1
    sequences: int = 0
    """Candidates that the run asks this engine for at once; 0: not known."""
    sleeps: bool = False
    """Whether it shares its GPU with a learner."""
    alone: bool = False
    """Whether nothing else runs in this process."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of engine: the module:function that opens it from an `EngineConfig`, and what it can do."""

    open: str
    extra: str = ""
    """The extra of cotune that installs it."""
    fixed: bool = False
    """It makes room for its policies when it starts: so many adapters, or one version of one policy's full weights."""
    adapters_only: bool = False
    by_url: bool = False
    """It runs already, at an address."""
    sleeps: bool = False
    """It can free its GPU while a learner works."""


SERVER = "vllm-url"
"""The row of a vLLM server that runs already. A run names it by its address."""
ENGINES = {
    "transformers": Engine(open="cotune.integrations.models.transformers.sampler:open_engine"),
    "vllm": Engine(open="cotune.integrations.models.vllm.opening:open_engine", extra="vllm", fixed=True, sleeps=True),
    SERVER: Engine(open="cotune.integrations.models.vllm.opening:open_server", adapters_only=True, by_url=True),
}


def engine_name(engine: str) -> str:
    """The name of the row of an engine, as a run names it: the address of a server is the row of servers."""
    return SERVER if engine.startswith(("http://", "https://")) else engine


def engine_of(engine: str) -> Engine:
    """The row of an engine. One of the user's own, module:function, is taken to serve whatever it is given."""
    name = engine_name(engine)
    return ENGINES.get(name) or Engine(open=name)


def products_dtype(dtype: str | None) -> str | None:
    """The precision in which the in-process engine samples from adapters that were trained in `dtype`: bfloat16 too,
    on processors that multiply it; None for its own."""
    if dtype != "bfloat16":
        return None
    from cotune.integrations.models.bfloat16 import has_bfloat16

    return dtype if has_bfloat16() else None


async def open_sampler(config: EngineConfig) -> Sampler:
    """Open an engine. Raises ConfigError, and what the engine raises."""
    opened: Callable[..., Awaitable[Sampler]] = load_object("engine", engine_of(config.engine).open, "my_engine:open")
    if config.engine in ENGINES:
        return await opened(config)
    return await opened(model=config.model, **config.arguments)
