"""The in-process sampler: a transformers model on the CPU or on one GPU as a `Sampler`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from cotune.errors import ConfigError
from cotune.integrations.models.child.sampler import HostedSampler
from cotune.integrations.models.engines import EngineConfig
from cotune.integrations.models.transformers.host import ThreadHost, TransformersProcess
from cotune.integrations.models.transformers.wire import ModelSource


class TransformersSampler(HostedSampler):
    """Any causal LM of transformers as a `Sampler`, made by `open`.

    The engine runs in a child process or a thread, and accepts requests from every event loop and thread.
    """

    @classmethod
    async def open(
        cls, model: str | Path | Any, *, host: Literal["process", "thread"] = "process", **settings: Any
    ) -> TransformersSampler:
        """Load a model folder or Hub id and serve it. A model that is already loaded needs the host "thread".

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
        # Any other text may be the id of a model on the Hub.
        must_be_folder = isinstance(model, Path) or (isinstance(model, str) and Path(model).is_absolute())
        if must_be_folder and not Path(model, "config.json").exists():
            raise ConfigError("model", str(model), "is not a folder with config.json and weights", "Check --model.")
        source = ModelSource(str(model) if isinstance(model, Path) else model, **settings)
        sampler = cls(TransformersProcess if host == "process" else ThreadHost)
        return await sampler.start(source)


async def open_engine(config: EngineConfig) -> TransformersSampler:
    """Start the engine for `models.engines`: in a thread if this process is only there for it, else in a process."""
    options: dict[str, Any] = {"dtype": config.dtype, "threads": config.threads, "prefix_cache": config.prefix_cache}
    if config.alone:
        options["host"] = "thread"
    return await TransformersSampler.open(config.model, **options | dict(config.arguments))
