"""One started engine under the router: what it works on, and whether it is still well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cotune.errors import CotuneError, SamplerError
from cotune.integrations.ray.router import limits
from cotune.integrations.ray.router.versions import differences, expected
from cotune.integrations.samplers.versions import Version, Versions
from cotune.sampling.protocol import Sampler, SamplerInfo

log = logging.getLogger(__name__)

T = TypeVar("T")


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
        self.info: SamplerInfo | None = None
        """What it said at the last health check."""
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
        raise TimeoutError if self.healthy else TakenOut(self.down.result())

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

    async def _do(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await self.within(limits.CONTROL_SECONDS, work)
        except TakenOut:
            return
        except Exception as error:  # noqa: BLE001
            self.fail("unhealthy", f"it did not {what}: {describe(error)}")

    async def _wrong(self) -> str | None:
        before = expected(self._versions)
        try:
            self.info = await self.within(self._health_timeout, self.sampler.info())
        except TakenOut as gone:
            return str(gone)
        except TimeoutError:
            return f"it did not answer a health check within {self._health_timeout} s"
        except Exception as error:  # noqa: BLE001
            return describe(error)
        now = expected(self._versions)
        missing = differences({k: v for k, v in before.items() if now.get(k) == v}, self.info.served)
        return f"it has lost what was published: {'; '.join(missing)}" if missing else None


def describe(error: BaseException) -> str:
    """An error in a line that goes on."""
    if isinstance(error, CotuneError):
        return error.cause.rstrip(".")
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return f"{type(error).__name__}: {error}"
