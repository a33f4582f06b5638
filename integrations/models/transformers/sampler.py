"""The in-process sampler: a transformers model on CPU or one GPU behind the `Sampler` protocol."""

from __future__ import annotations

from collections.abc import Sequence
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
        cls,
        model: str | Path | Any,
        *,
        device: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        max_batch_rows: int = 1024,
        max_batch_tokens: int = 1 << 22,
        host: Literal["process", "thread"] = "process",
        tokenizer: Any = None,
        end_token_ids: Sequence[int] | None = None,
        prefix_cache: int | None = None,
    ) -> TransformersSampler:
        """Load a model folder or hub id and start serving it; a loaded model is served by a thread only.

        `device` is "cpu" or "cuda" (default: a GPU where there is one), `dtype` a torch name (default: float32 on
        CPU, bfloat16 on GPU; on a CPU that has bfloat16 it is the precision of products alone), `threads` those on
        the CPU (default: torch's, the cores that are there; one for a small model). `max_batch_rows` sequences are
        decoded at once at most, with at most `max_batch_tokens` key/value columns in all. Prompts go on from the keys
        and values of earlier ones that began alike, of which `prefix_cache` bytes are kept (0: none; default: 1/32 of
        the memory of the machine, or of the GPU). Raises ConfigError for a model that cannot be
        loaded.
        """
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
        source = ModelSource(
            model=str(model) if isinstance(model, Path) else model,
            device=device,
            dtype=dtype,
            threads=threads,
            max_batch_rows=max_batch_rows,
            max_batch_tokens=max_batch_tokens,
            tokenizer=tokenizer,
            end_token_ids=None if end_token_ids is None else tuple(end_token_ids),
            prefix_cache=prefix_cache,
        )
        return await cls(TransformersProcess if host == "process" else ThreadHost).start(source)


async def open_engine(config: EngineConfig) -> TransformersSampler:
    """As a row of `models.engines`: in a process of its own, or in a thread where this process has nothing else."""
    own: dict[str, Any] = {"dtype": config.dtype, "threads": config.threads, "prefix_cache": config.prefix_cache}
    if config.alone:
        own["host"] = "thread"
    return await TransformersSampler.open(config.model, **own | dict(config.arguments))
