"""The in-process sampler: a transformers model on CPU or one GPU behind the `Sampler` protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from cotune.errors import ConfigError
from cotune.integrations.models.child.sampler import HostedSampler
from cotune.integrations.models.engines import EngineConfig
from cotune.integrations.models.transformers.host import ThreadHost, TransformersProcess
from cotune.integrations.models.transformers.wire import ModelSource


class TransformersSampler(HostedSampler):
    """Any transformers causal LM as a `Sampler`; made by `open`.

    The engine lives in a process or a thread of its own and takes requests from every event loop and thread.
    """

    @classmethod
    async def open(
        cls, model: str | Path | Any, *, host: Literal["process", "thread"] = "process", **settings: Any
    ) -> TransformersSampler:
        """Load a model folder or hub id and start serving it; a loaded model is served by a thread only.

        `settings` are fields of `ModelSource`. Raises ConfigError for a model that cannot be loaded.
        """
        prefix_cache = settings.get("prefix_cache")
        if prefix_cache is not None and prefix_cache < 0:
            raise ConfigError("prefix_cache", prefix_cache, "must be a number of bytes, or 0 for none")
        if host not in ("process", "thread"):
            raise ConfigError("host", host, "must be process or thread")
        if host == "process" and not isinstance(model, str | Path):
            raise ConfigError(
                "host",
                host,
                "cannot serve a model that is already loaded",
                'Use host = "thread", or pass the model\'s folder.',
            )
        folder = isinstance(model, Path) or (isinstance(model, str) and Path(model).is_absolute())
        if folder and not Path(model, "config.json").exists():
            raise ConfigError("model", str(model), "is not a folder with config.json and weights", "Check --model.")
        source = ModelSource(str(model) if isinstance(model, Path) else model, **settings)
        return await cls(TransformersProcess if host == "process" else ThreadHost).start(source)


async def open_engine(config: EngineConfig) -> TransformersSampler:
    """As a row of `models.engines`: in a process of its own, or in a thread where this process has nothing else."""
    own: dict[str, Any] = {"dtype": config.dtype, "threads": config.threads, "prefix_cache": config.prefix_cache}
    if config.alone:
        own["host"] = "thread"
    return await TransformersSampler.open(config.model, **own | dict(config.arguments))
