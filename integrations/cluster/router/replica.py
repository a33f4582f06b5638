"""One replica of the router: its engine from start to end, how well that is, and a new one in its place."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, TypeVar

from cotune.errors import ConfigError, SamplerError, SyncError, error_line
from cotune.integrations.cluster.router import limits
from cotune.integrations.models.served_versions import Version, Versions
from cotune.integrations.profiling.spans import Trace
from cotune.sampling.protocol import Sampler, SamplerInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

Make = Callable[[], Coroutine[Any, Any, Sampler]]


class TakenOut(Exception):
    """The engine was taken out while somebody waited for it."""


class Engine:
    """A sampler from its start to its first serious fault; a restart makes a new one. Belongs to one event loop.

    `down` is done, with the reason, once no request may go to it any more; `failed` is then called with the counter.
    `health_timeout` is how many seconds it may take to answer a health check.
    """

    def __init__(
        self, name: str, sampler: Any, versions: Versions, health_timeout: float, failed: Callable[[str], None]
    ) -> None:
        self.name = name
        self.sampler: Sampler = sampler
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.running = 0
        """Requests that it works on; `load` are the tokens that they may take."""
        self.load = 0
        self.idle_since = 0
        """A number that grows with each request it is given; the smallest was given one the longest time ago."""
        self._versions = versions
        self._health_timeout = health_timeout
        self._failed = failed
        self._faults = 0

    @property
    def healthy(self) -> bool:
        return not self.down.done()

    def fail(self, kind: str, reason: str) -> None:
        """Take the engine out; `kind` is the counter. Only the first reason counts."""
        if self.healthy:
            self.down.set_result(reason)
            self._failed(kind)

    def answered(self) -> None:
        """A request was answered as it should be."""
        self._faults = 0

    def fault(self, reason: str) -> None:
        """A request failed by the engine's fault; too many in a row take it out."""
        log.warning("Engine %s: %s.", self.name, reason)
        self._faults += 1
        if self._faults >= limits.FAULTS_IN_A_ROW:
            self.fail("faulty", f"{self._faults} requests in a row failed; the last one: {reason}")

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on this engine, which is cancelled when it is not there in time.

        Raises TimeoutError, TakenOut, and what `work` raises.
        """
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self.down}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if task.cancelled():
            raise SamplerError("It cancelled the request by itself.")
        if task.done():
            return task.result()
        if not self.healthy:
            raise TakenOut(self.down.result())
        raise TimeoutError("no answer in time")

    async def probe(self) -> str | None:
        """Whether it answers and serves everything that was published: None, or what is wrong, and it is taken out."""
        wrong = await self._wrong()
        if wrong is not None:
            self.fail("unhealthy", wrong)
        return wrong

    async def publish(self, version: Version) -> str:
        """Serve a version; returns the fingerprint that arrived. Raises as `within`."""
        work = self.sampler.publish(version.policy, version.target.weights, version.target.lora)
        return await self.within(limits.CONTROL_SECONDS, work)

    async def retire(self, version: Version) -> None:
        """Stop serving a version. An engine that does not is taken out."""
        await self._do(f"retire {version.policy}", self.sampler.retire(version.policy))

    async def sleep(self) -> None:
        """An engine that does not sleep is taken out."""
        await self._do("sleep", self.sampler.sleep())  # type: ignore[attr-defined]

    async def wake(self) -> None:
        """An engine that does not wake is taken out."""
        await self._do("wake", self.sampler.wake())  # type: ignore[attr-defined]

    async def begin_trace(self) -> None:
        await self.within(limits.CONTROL_SECONDS, self.sampler.begin_trace())  # type: ignore[attr-defined]

    async def end_trace(self) -> list[Trace]:
        return await self.within(limits.CONTROL_SECONDS, self.sampler.end_trace())  # type: ignore[attr-defined]

    async def _do(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await self.within(limits.CONTROL_SECONDS, work)
        except TakenOut:
            return
        except Exception as error:  # noqa: BLE001
            self.fail("unhealthy", f"it did not {what}: {error_line(error)}")

    async def _wrong(self) -> str | None:
        before = expected(self._versions)
        try:
            info = await self.within(self._health_timeout, self.sampler.info())
        except TakenOut as gone:
            return str(gone)
        except TimeoutError:
            return f"it did not answer a health check within {self._health_timeout} s"
        except Exception as error:  # noqa: BLE001
            return error_line(error)
        now = expected(self._versions)
        missing = differences({k: v for k, v in before.items() if now.get(k) == v}, info.served)
        return f"it has lost what was published: {'; '.join(missing)}" if missing else None


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
        """What its engine said when it started."""
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
                    self._lose(error_line(error))
                    return
                self._not_started(error_line(error))
            except TimeoutError:
                self._not_started(f"it did not start within {limits.START_SECONDS:g} s")
            except Exception as error:  # noqa: BLE001
                self._not_started(error_line(error))
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
                log.warning("Engine %s failed while it ended: %s.", self.name, error_line(error))

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
            self.info = await engine.within(self._health_timeout, engine.sampler.info())
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
            well = engine.healthy and await engine.probe() is None
            if well and asyncio.get_running_loop().time() - since >= limits.FORGIVE_AFTER:
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


def expected(versions: Versions) -> dict[str, str]:
    """Fingerprints of what every healthy engine serves at this moment; nothing while versions come or go.

    An engine may hold the full weights of one version only: of those the last one counts.
    """
    if versions.lock.locked():
        return {}
    last = {version.policy.name: version for version in versions.all() if version.target.lora is None}
    kept = [v for v in versions.all() if not v.retired and (v.target.lora is not None or v in last.values())]
    return {str(version.policy): version.fingerprint for version in kept}


def differences(wanted: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """What an engine does not serve as it should, in words."""
    wrong = []
    for key, fingerprint in sorted(wanted.items()):
        if key not in served:
            wrong.append(f"{key} is missing")
        elif served[key] != fingerprint:
            wrong.append(f"{key} has the fingerprint {served[key]} instead of {fingerprint}")
    return wrong
