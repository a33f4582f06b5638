"""The in-process sampler: a transformers model on CPU or one GPU behind the `Sampler` protocol."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from cotune.errors import ConfigError, SamplerError
from cotune.integrations.models.engine_sampler import CalledSampler
from cotune.integrations.models.engines import EngineConfig
from cotune.integrations.models.transformers.host import ProcessHost, ThreadHost
from cotune.integrations.models.transformers.wire import Answer, Command, ModelSource


class TransformersSampler(CalledSampler):
    """Any transformers causal LM as a `Sampler`; made by `open`.

    The engine lives in a process or a thread of its own and takes requests from every event loop and thread.
    """

    def __init__(self, host: type[ProcessHost | ThreadHost]) -> None:
        self._host = host(self._receive, self._fail)
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._broken: SamplerError | None = None

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
        sampler = cls(ProcessHost if host == "process" else ThreadHost)
        try:
            await asyncio.to_thread(sampler._start, source)
        except asyncio.CancelledError:
            sampler._fail(_closed())
            sampler._host.kill()
            raise
        return sampler

    async def aclose(self) -> None:
        """Stop the engine; pending requests fail with SamplerError. Safe to call twice."""
        self._fail(_closed())
        await asyncio.to_thread(self._host.close)

    @property
    def broken(self) -> SamplerError | None:
        """Why the engine answers no more; None while it does."""
        return self._broken

    def _start(self, source: ModelSource) -> None:
        self._host.start(source)
        if self._broken is not None:  # nobody waits for it any more
            self._host.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        id = next(self._ids)
        answer: Future[Any] = Future()
        with self._lock:
            if self._broken is not None:
                raise SamplerError(self._broken.cause, self._broken.remedy)
            self._pending[id] = answer
        self._host.send(Command(method, id, arguments))
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with self._lock:
                unanswered = self._pending.pop(id, None)
            if unanswered is not None and method == "sample":
                self._host.send(Command("cancel", id))
            raise

    def _receive(self, replies: Sequence[Answer]) -> None:
        with self._lock:
            answers = [self._pending.pop(reply.id, None) for reply in replies]
        for reply, answer in zip(replies, answers, strict=True):
            if answer is None or not answer.set_running_or_notify_cancel():
                continue
            if reply.error is not None:
                answer.set_exception(reply.error)
            else:
                answer.set_result(reply.value)

    def _fail(self, error: SamplerError) -> None:
        """The engine is gone: fail what is pending and everything after. The first reason stays."""
        with self._lock:
            if self._broken is None:
                self._broken = error
            pending = list(self._pending.values())
            self._pending.clear()
        for answer in pending:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(SamplerError(error.cause, error.remedy))


async def open_engine(config: EngineConfig) -> TransformersSampler:
    """As a row of `models.engines`: in a process of its own, or in a thread where this process has nothing else."""
    own: dict[str, Any] = {"dtype": config.dtype, "threads": config.threads, "prefix_cache": config.prefix_cache}
    if config.alone:
        own["host"] = "thread"
    return await TransformersSampler.open(config.model, **own | dict(config.arguments))


def _closed() -> SamplerError:
    return SamplerError("The sampler was closed.", "Open a new one.")
