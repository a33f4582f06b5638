"""Starts an engine again when it ends, up to a few times."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cotune.errors import CotuneError, EngineLost, SamplerError
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplerInfo, SamplingParams, Weights


class EngineThatEnds(Sampler, Protocol):
    """A sampler that can say why its engine has ended."""

    @property
    def broken(self) -> SamplerError | None:
        """The error that ended it; None while it answers."""


RESTARTS = 3
"""Most restarts of an engine within `RESTART_WINDOW`."""
RESTART_WINDOW = 600.0
"""Seconds, up to now, whose restarts are counted."""
log = logging.getLogger("cotune.engine")


@dataclass(eq=False)
class Restarting:
    """A `Sampler` that replaces its engine when the engine ends. Requests that failed because of this are sent again,
    once.

    `open_engine` opens an engine and publishes its policies to it. `model` names the engine in messages; empty if there
    is only one. May be used from any event loop.
    """

    open_engine: Callable[[], Coroutine[Any, Any, EngineThatEnds]]
    _sampler: EngineThatEnds
    model: str = ""
    restarts: int = 0
    _end_times: list[float] = field(default_factory=list)
    _lost: EngineLost | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Sample completions. Raises EngineLost once the restarts are used up."""
        sampler = await self._running()
        try:
            return await sampler.sample(prompt_token_ids, n, params, policy)
        except SamplerError:
            if sampler.broken is None or self._closed:
                raise
        # The engine ended during the request, so the request is sent once more, to its successor.
        next_sampler = await self._running()
        return await next_sampler.sample(prompt_token_ids, n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Not used: `open_engine` publishes to each engine."""
        raise NotImplementedError

    async def retire(self, policy: PolicyRef) -> None:
        raise NotImplementedError

    async def info(self) -> SamplerInfo:
        sampler = await self._running()
        return await sampler.info()

    async def aclose(self) -> None:
        self._closed = True
        # In a thread: a restart may hold the lock for a while.
        sampler = await asyncio.to_thread(self.engine)
        await sampler.aclose()

    def engine(self) -> EngineThatEnds:
        """The present engine. If it has ended, start the next one and wait for it.

        Raises EngineLost once the restarts are used up.
        """
        with self._lock:
            if (ended := self._sampler.broken) is not None and not self._closed:
                if self._lost is not None:
                    raise EngineLost(self._lost.cause, self._lost.remedy)
                self._restart(f"{self.model}: {ended.cause}" if self.model else ended.cause)
            return self._sampler

    async def _running(self) -> EngineThatEnds:
        if self._sampler.broken is None:
            return self._sampler
        return await asyncio.to_thread(self.engine)

    def _restart(self, cause: str) -> None:
        """Replace the engine that has ended; `cause` says why it did. Raises EngineLost after too many restarts in a
        short time.
        """
        asyncio.run(self._sampler.aclose())
        latest_cause = cause
        while not self._closed:
            now = time.monotonic()
            recent_ends = [end_time for end_time in self._end_times if end_time > now - RESTART_WINDOW]
            self._end_times = [*recent_ends, now]
            if len(self._end_times) > RESTARTS:
                used_up = f"Its restarts are used up: {RESTARTS} within {RESTART_WINDOW / 60:g} minutes."
                remedy = "Look at the machine's memory and at the engine's own messages above, then start again."
                self._lost = EngineLost(f"{latest_cause} {used_up}", remedy)
                raise self._lost
            log.error("%s It is started again (%d of %d).", latest_cause, len(self._end_times), RESTARTS)
            try:
                self._sampler = asyncio.run(self.open_engine())
            except (CotuneError, OSError) as error:
                latest_cause = str(error)  # a failed start counts as one of the restarts
            else:
                self.restarts += 1
                log.warning("The engine%s is back.", f" of {self.model}" if self.model else "")
                return
