"""A sampler whose engine is started again when it ends, within bounds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

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

    `opened` opens an engine with all that it serves. May be used from any event loop.
    """

    def __init__(
        self, opened: Callable[[], Coroutine[Any, Any, TransformersSampler]], first: TransformersSampler
    ) -> None:
        self.restarts = 0
        self._opened = opened
        self._sampler = first
        self._ends: list[float] = []
        self._lost: EngineLost | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """As the engine's; raises EngineLost once no engine is left."""
        sampler = await self._running()
        try:
            return await sampler.sample(prompt_token_ids, n, params, policy)
        except SamplerError:
            if sampler.broken is None or self._closed:
                raise
        return await (await self._running()).sample(prompt_token_ids, n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """What an engine serves is what `opened` gives it."""
        raise NotImplementedError

    async def retire(self, policy: PolicyRef) -> None:
        raise NotImplementedError

    async def info(self) -> SamplerInfo:
        return await (await self._running()).info()

    async def aclose(self) -> None:
        self._closed = True
        await (await asyncio.to_thread(self.engine)).aclose()

    def engine(self) -> TransformersSampler:
        """The engine that serves; where it has ended, the next one, once that has started. Blocks meanwhile.

        Raises EngineLost once the restarts are used up.
        """
        with self._lock:
            if (ended := self._sampler.broken) is not None and not self._closed:
                if self._lost is not None:
                    raise EngineLost(self._lost.cause, self._lost.remedy)
                self._restart(ended.cause)
            return self._sampler

    async def _running(self) -> TransformersSampler:
        return self._sampler if self._sampler.broken is None else await asyncio.to_thread(self.engine)

    def _restart(self, cause: str) -> None:
        asyncio.run(self._sampler.aclose())
        while not self._closed:
            now = time.monotonic()
            self._ends = [at for at in self._ends if at > now - WITHIN] + [now]
            if len(self._ends) > RESTARTS:
                used_up = f"Its restarts are used up: {RESTARTS} within {WITHIN / 60:g} minutes."
                remedy = "Look at the machine's memory and at the engine's own messages above, then start again."
                self._lost = EngineLost(f"{cause} {used_up}", remedy)
                raise self._lost
            log.error("%s It is started again (%d of %d).", cause, len(self._ends), RESTARTS)
            try:
                self._sampler = asyncio.run(self._opened())
            except (CotuneError, OSError) as error:
                cause = str(error)
            else:
                self.restarts += 1
                log.warning("The engine is back.")
                return
