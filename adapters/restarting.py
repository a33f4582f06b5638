"""A sampler whose engine is started again when it ends, within bounds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from cotune.errors import CotuneError, EngineLost, SamplerError
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights

if TYPE_CHECKING:
    from cotune.integrations.samplers.transformers.sampler import TransformersSampler

RESTARTS, WITHIN = 3, 600.0
"""How often an engine is started again within so many seconds."""
log = logging.getLogger("cotune.engine")


class Restarting:
    """A `Sampler`. Requests that an engine's end fails are sent once more to the next engine.

    `opened` opens an engine with all that it serves. `lost` is the error that every request gets once the restarts are
    used up. May be used from any event loop.
    """

    def __init__(self, opened: Callable[[], Awaitable[TransformersSampler]], first: TransformersSampler) -> None:
        self.restarts = 0
        self.lost: EngineLost | None = None
        self._opened = opened
        self._sampler = first
        self._ends: list[float] = []
        self._opening: Future[None] | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "cotune-restart")
        self._closed = False

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """As the engine's; raises EngineLost once no engine is left."""
        await self._ready()
        sampler = self._sampler
        try:
            return await sampler.sample(prompt_token_ids, n, params, policy)
        except SamplerError:
            if sampler.broken is None or self._closed:
                raise
        await self._ready()
        return await self._sampler.sample(prompt_token_ids, n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """What an engine serves is what `opened` gives it."""
        raise NotImplementedError

    async def retire(self, policy: PolicyRef) -> None:
        raise NotImplementedError

    async def info(self) -> SamplerInfo:
        await self._ready()
        return await self._sampler.info()

    async def aclose(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown)
        await self._sampler.aclose()

    def look(self) -> None:
        """Notice an engine that has ended, and start the next one in the background."""
        with self._lock:
            if self._opening is None and self.lost is None and not self._closed and self._sampler.broken is not None:
                self._opening = self._pool.submit(self._restart, self._sampler.broken)

    async def _ready(self) -> None:
        self.look()
        if (opening := self._opening) is not None:
            await asyncio.shield(asyncio.wrap_future(opening))
        if self.lost is not None:
            raise EngineLost(self.lost.cause, self.lost.remedy)

    def _restart(self, ended: SamplerError) -> None:
        cause = ended.cause
        try:
            asyncio.run(self._sampler.aclose())
            while not self._closed:
                now = time.monotonic()
                self._ends = [at for at in self._ends if at > now - WITHIN] + [now]
                if len(self._ends) > RESTARTS:
                    remedy = "Look at the machine's memory and at the engine's own messages above, then start again."
                    self.lost = EngineLost(
                        f"{cause} Its restarts are used up: {RESTARTS} within {WITHIN / 60:g} minutes.", remedy
                    )
                    return
                log.error("%s It is started again (%d of %d).", cause, len(self._ends), RESTARTS)
                try:
                    self._sampler = asyncio.run(_awaited(self._opened))
                except (CotuneError, OSError) as error:
                    cause = str(error)
                else:
                    self.restarts += 1
                    log.warning("The engine is back.")
                    return
        finally:
            with self._lock:
                self._opening = None


async def _awaited(opened: Callable[[], Awaitable[TransformersSampler]]) -> TransformersSampler:
    return await opened()
