"""One replica of the router: starts its engine, watches it, and starts a new one in its place while it may."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from cotune.errors import ConfigError, SamplerError, SyncError
from cotune.integrations.ray.router.deadline import run_with_deadline
from cotune.integrations.ray.router.engine import Engine, said
from cotune.integrations.ray.router.settings import ReplicaStats, RouterSettings
from cotune.integrations.ray.router.versions import Published, Version
from cotune.sampling.protocol import Sampler, SamplerInfo

log = logging.getLogger(__name__)

Make = Callable[[], Awaitable[Sampler]]


class Replica:
    """`state` is starting, healthy, failed (to be restarted), lost (restarts used up) or closed.

    `say` takes texts for people, `changed` is called after every change of state.
    """

    def __init__(
        self,
        name: str,
        make: Make,
        settings: RouterSettings,
        published: Published,
        counters: Counter[str],
        say: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.state = "starting"
        self.engine: Engine | None = None
        self.refused: ConfigError | None = None
        """Why the first start can never succeed."""
        self.fault: str | None = None
        self.info: SamplerInfo | None = None
        """What its engine said when it was last healthy."""
        self.restarts = 0
        self._spent = 0
        self._answered = 0
        self._held: dict[str, Version] = {}
        """What the last engine was given; a server that outlives its connection still has it."""
        self._ending: asyncio.Task[None] | None = None
        self._make = make
        self._settings = settings
        self._published = published
        self._counters = counters
        self._say = say
        self._changed = changed

    @property
    def healthy(self) -> bool:
        return self.state == "healthy"

    def stats(self) -> ReplicaStats:
        engine = self.engine
        return ReplicaStats(
            state=self.state,
            running=engine.running if engine else 0,
            answered=self._answered + (engine.answered if engine else 0),
            restarts=self.restarts,
            fault=self.fault,
        )

    async def supervise(self) -> None:
        """Keep an engine running until its restarts are used up; cancelled when the router closes."""
        try:
            while await self._started():
                await self._watch()
                await self.end()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("The supervision of %s failed.", self.name)
            self._lose(said(error))

    async def end(self) -> None:
        """End the engine, if there is one; what it says about that is logged only."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self._answered += engine.answered
            self._held = engine.versions
            self._ending = asyncio.create_task(_end(self.name, engine.sampler, self._settings.close_timeout))
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def close(self) -> None:
        """No request goes to it any more, and what it works on is given up."""
        engine, self.state = self.engine, "closed"
        if engine is not None and engine.healthy:
            engine.down.set_result("the sampler was closed")

    async def _started(self) -> bool:
        """Start an engine, with pauses between the attempts. False when the restarts are used up."""
        while True:
            if self.state == "failed" and not await self._may_restart():
                return False
            loop = asyncio.get_running_loop()
            started = loop.time()
            try:
                await self._start()
            except ConfigError as error:
                if not self.restarts:
                    self.refused = error
                    self._lose(said(error))
                    return False
                self._start_failed(said(error))
            except TimeoutError:
                self._start_failed(f"it did not start within {loop.time() - started:.3g} s")
            except Exception as error:  # noqa: BLE001
                self._start_failed(said(error))
            else:
                return True
            await self.end()

    async def _may_restart(self) -> bool:
        settings = self._settings
        if self._spent >= settings.max_restarts:
            self._lose(f"{self.fault} (after {self._spent} restarts)")
            return False
        pause = min(settings.backoff * 2**self._spent, settings.max_backoff)
        self._spent += 1
        self.restarts += 1
        self._counters["restarts"] += 1
        self._say(f"Engine {self.name} is restarted in {pause:.3g} s ({self._spent} of {settings.max_restarts}).")
        await asyncio.sleep(pause)
        return True

    async def _start(self) -> None:
        sampler = await run_with_deadline(self._settings.start_timeout, self._made())
        engine = Engine(
            self.name, sampler, self._settings, self._published, self._counters, lambda _: self._taken_out()
        )
        self.engine = engine
        await self._take_over(engine)
        await self._catch_up(engine)
        async with self._published.lock:
            await self._catch_up(engine)
            wrong = await engine.probe()
            if wrong is not None:
                raise SamplerError(wrong)
            self.info = engine.info
            self.state = "healthy"
        if self.restarts:
            self._say(f"Engine {self.name} is back, with {len(engine.versions)} published versions.")
        self._changed()

    async def _made(self) -> Sampler:
        """A sampler from the factory; one that comes too late is ended."""
        making = asyncio.ensure_future(self._make())
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.cancel()
            making.add_done_callback(self._came_late)
            raise

    def _came_late(self, making: asyncio.Future[Sampler]) -> None:
        if not making.cancelled() and making.exception() is None:
            task = asyncio.ensure_future(_end(self.name, making.result(), self._settings.close_timeout))
            _late.add(task)
            task.add_done_callback(_late.discard)

    async def _take_over(self, engine: Engine) -> None:
        """See what it still has of what was published through an earlier connection to it."""
        wrong = await engine.probe()
        if wrong is not None:
            raise SamplerError(wrong)
        for key, version in self._held.items():
            if engine.info.served.get(key) == version.fingerprint:
                engine.versions[key] = version

    async def _catch_up(self, engine: Engine) -> None:
        """Publish what it lacks, withdraw what was retired meanwhile."""
        for version in self._published.versions().values():
            if str(version.policy) not in engine.versions:
                arrived = await engine.publish(version)
                if arrived is not None:
                    raise SyncError(
                        f"{version.policy} arrived at {self.name} with fingerprint {arrived}; "
                        f"{version.fingerprint} was sent."
                    )
        for key, version in list(engine.versions.items()):
            if key not in self._published.versions():
                await engine.withdraw(version)

    async def _watch(self) -> None:
        """Check its health until it is taken out."""
        engine, settings = self.engine, self._settings
        while engine.healthy:
            await asyncio.wait({engine.down}, timeout=settings.health_every)
            if engine.healthy:
                await engine.probe()
            if engine.healthy and asyncio.get_running_loop().time() - engine.since >= settings.forgive_after:
                self._spent = 0

    def _taken_out(self) -> None:
        """Called by its engine, once."""
        if self.state == "healthy":
            self.state = "failed"
            self.fault = self.engine.down.result()
            self._say(f"Engine {self.name} is taken out: {self.fault}.")
            self._changed()

    def _start_failed(self, reason: str) -> None:
        self.state = "failed"
        self.fault = f"it did not start: {reason}"
        self._counters["failed_starts"] += 1
        self._say(f"Engine {self.name} did not start: {reason}.")
        self._changed()

    def _lose(self, reason: str) -> None:
        self.state = "lost"
        self.fault = reason
        self._counters["lost"] += 1
        self._say(f"Engine {self.name} is given up: {reason}.")
        self._changed()


_late: set[asyncio.Future[None]] = set()
"""Ends of samplers that nobody waits for."""


async def _end(name: str, sampler: Sampler, timeout: float) -> None:
    """Close a sampler. One that does not end in time is cancelled, and waited for as long again."""
    task = asyncio.ensure_future(sampler.aclose())
    for last in (False, True):
        try:
            await asyncio.wait({task}, timeout=timeout)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            break
        task.cancel()
        log.warning("Engine %s did not end within %s s%s.", name, timeout, "; it is left to itself" if last else "")
    if task.done() and not task.cancelled() and task.exception() is not None:
        log.warning("Engine %s failed while it ended: %s.", name, said(task.exception()))
