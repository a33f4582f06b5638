"""One replica of the router: starts its engine, watches it, and starts a new one in its place while it may."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from cotune.errors import ConfigError, SyncError
from cotune.integrations.ray.router import limits
from cotune.integrations.ray.router.engine import Engine, describe
from cotune.integrations.samplers.versions import Versions
from cotune.sampling.protocol import Sampler, SamplerInfo

log = logging.getLogger(__name__)

Make = Callable[[], Coroutine[Any, Any, Sampler]]


class Replica:
    """`state` is starting, healthy, failed (to be restarted), lost (restarts used up) or closed.

    An engine is restarted `max_restarts` times, failed starts included. `changed` is called after every change of
    state.
    """

    def __init__(
        self,
        name: str,
        make: Make,
        versions: Versions,
        counters: Counter[str],
        changed: Callable[[], None],
        *,
        max_restarts: int,
        health_timeout: float,
    ) -> None:
        self.name = name
        self.state: Literal["starting", "healthy", "failed", "lost", "closed"] = "starting"
        self.engine: Engine | None = None
        self.refused: ConfigError | None = None
        """Why the first start can never succeed."""
        self.fault = ""
        """Why its engine was taken out, or did not start, the last time."""
        self.info: SamplerInfo | None = None
        """What its engine said when it was last healthy."""
        self._restarts = 0
        self._make = make
        self._versions = versions
        self._counters = counters
        self._changed = changed
        self._max_restarts = max_restarts
        self._health_timeout = health_timeout

    async def supervise(self) -> None:
        """Keep an engine running until its restarts are used up; cancelled when the router closes."""
        while True:
            try:
                await self._start()
            except ConfigError as error:
                if self.state == "starting":
                    self.refused = error
                    self._lose(describe(error))
                    return
                self._not_started(describe(error))
            except TimeoutError:
                self._not_started(f"it did not start within {limits.START_SECONDS:g} s")
            except Exception as error:  # noqa: BLE001
                self._not_started(describe(error))
            else:
                await self._watch()
            await self.end()
            if self._restarts >= self._max_restarts:
                self._lose(f"{self.fault} (after {self._restarts} restarts)")
                return
            await self._pause()

    async def end(self) -> None:
        """End the engine, if there is one; what it says about that is logged only."""
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                async with asyncio.timeout(limits.CLOSE_SECONDS):
                    await engine.sampler.aclose()
            except Exception as error:  # noqa: BLE001
                log.warning("Engine %s failed while it ended: %s.", self.name, describe(error))

    def close(self) -> None:
        """No request goes to it any more, and what it works on is given up."""
        engine, self.state = self.engine, "closed"
        if engine is not None:
            engine.fail("", "the sampler was closed")

    async def _start(self) -> None:
        async with asyncio.timeout(limits.START_SECONDS):
            sampler = await self._make()
        engine = self.engine = Engine(self.name, sampler, self._versions, self._health_timeout, self._taken_out)
        async with self._versions.lock:
            versions = self._versions.all()
            for version in versions:
                arrived = await engine.publish(version)
                if arrived != version.fingerprint:
                    raise SyncError(
                        f"{version.policy} arrived at {self.name} with fingerprint {arrived}; "
                        f"{version.fingerprint} was sent."
                    )
            self.info = engine.info = await engine.within(self._health_timeout, engine.sampler.info())
            if self.state == "failed":
                log.warning("Engine %s is back, with %d published versions.", self.name, len(versions))
            self.state = "healthy"
        self._changed()

    async def _watch(self) -> None:
        """Check its health until it is taken out."""
        engine, since = self.engine, asyncio.get_running_loop().time()
        assert engine is not None
        while engine.healthy:
            await asyncio.wait({engine.down}, timeout=limits.HEALTH_EVERY)
            if engine.healthy and await engine.probe() is None:
                self.info = engine.info
                if asyncio.get_running_loop().time() - since >= limits.FORGIVE_AFTER:
                    self._restarts = 0

    async def _pause(self) -> None:
        pause = min(limits.BACKOFF * 2**self._restarts, limits.MAX_BACKOFF)
        self._restarts += 1
        self._counters["restarts"] += 1
        log.warning(
            "Engine %s is restarted in %.3g s (%d of %d).", self.name, pause, self._restarts, self._max_restarts
        )
        await asyncio.sleep(pause)

    def _taken_out(self, kind: str) -> None:
        """Called by its engine, once."""
        if self.state == "healthy" and self.engine is not None:
            self._counters[kind] += 1
            self.state, self.fault = "failed", self.engine.down.result()
            log.warning("Engine %s is taken out: %s.", self.name, self.fault)
            self._changed()

    def _not_started(self, reason: str) -> None:
        self._counters["failed_starts"] += 1
        self.state, self.fault = "failed", f"it did not start: {reason}"
        log.warning("Engine %s did not start: %s.", self.name, reason)
        self._changed()

    def _lose(self, reason: str) -> None:
        self._counters["lost"] += 1
        self.state, self.fault = "lost", reason
        log.warning("Engine %s is given up: %s.", self.name, reason)
        self._changed()
