"""One started engine under the router: what it works on, how its last requests ended, and whether it is still well."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Literal

from cotune.errors import CotuneError
from cotune.integrations.ray.router.deadline import Interrupted, run_with_deadline
from cotune.integrations.ray.router.latency import Pace
from cotune.integrations.ray.router.settings import RouterSettings
from cotune.integrations.ray.router.versions import Published, Version, differences
from cotune.sampling.protocol import Sampler, SamplerInfo

log = logging.getLogger(__name__)


class Engine:
    """A sampler from its start to its first serious fault; a restart makes a new one. Belongs to one event loop.

    `down` is done, with the reason, once no request may go to it any more.
    """

    def __init__(
        self,
        name: str,
        sampler: Sampler,
        settings: RouterSettings,
        published: Published,
        counters: Counter[str],
        failed: Callable[[Engine], None],
    ) -> None:
        self.name = name
        self.sampler = sampler
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.since = self.down.get_loop().time()
        self.running = 0
        self.load = 0
        self.idle_since = 0
        self.answered = 0
        self.pace = Pace()
        self.info: SamplerInfo | None = None
        self.versions: dict[str, Version] = {}
        """What this router has published to it, in order."""
        self._settings = settings
        self._published = published
        self._counters = counters
        self._failed = failed
        self._outcomes: deque[bool] = deque(maxlen=settings.outcomes)
        self._doubts = 0
        self._arriving: Version | None = None
        self._probing: asyncio.Task[str | None] | None = None

    @property
    def healthy(self) -> bool:
        return not self.down.done()

    def fail(self, kind: str, reason: str) -> None:
        """Take the engine out; `kind` is the counter. Only the first reason counts."""
        if self.healthy:
            self._counters[kind] += 1
            self.down.set_result(reason)
            self._failed(self)

    def well(self, seconds: float, tokens: int) -> None:
        """A request was answered as it should be."""
        self.answered += 1
        self._doubts = 0
        self._outcomes.append(True)
        self.pace.add(seconds, tokens)

    def late(self, seconds: float) -> None:
        """A request was given up by its caller after so long. Says something only beside the other engines' pace."""
        self.pace.add(seconds, 1)

    def fault(self, kind: str, reason: str) -> None:
        """A request failed by the engine's fault; too many of them take it out."""
        log.warning("Engine %s: %s (%s).", self.name, reason, kind)
        self._outcomes.append(False)
        faults = self._outcomes.count(False)
        judged = len(self._outcomes) >= self._settings.min_outcomes
        if judged and faults / len(self._outcomes) >= self._settings.max_fault_share:
            self.fail("faulty", f"{faults} of its last {len(self._outcomes)} requests failed; the last one: {reason}")

    def doubt(self, reason: str) -> None:
        """A request failed here as elsewhere, so by its own fault; an engine that answers nothing else is taken out."""
        self._doubts += 1
        if self._doubts >= self._settings.outcomes:
            self.fail("faulty", f"it answered none of {self._doubts} requests; the last one: {reason}")

    async def probe(self) -> str | None:
        """Whether it answers and serves everything that was published: None, or what is wrong, and it is taken out.

        Everybody who asks at the same time gets the same answer.
        """
        if not self.healthy:
            return self.down.result()
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def publish(self, version: Version) -> str | None:
        """Serve a version: None, or the fingerprint that arrived when it is another one.

        Raises TimeoutError, Interrupted when the engine is taken out meanwhile, and what the sampler raises.
        """
        work = self.sampler.publish(version.policy, version.weights, version.lora)
        self._arriving = version
        try:
            arrived = await run_with_deadline(self._settings.publish_timeout, work, unless=self.down)
        finally:
            self._arriving = None
        self.versions[str(version.policy)] = version
        return None if arrived == version.fingerprint else arrived

    async def withdraw(self, version: Version) -> None:
        """Stop serving a version. An engine that does not is taken out."""
        if self.versions.pop(str(version.policy), None) is None:
            return
        try:
            await run_with_deadline(
                self._settings.publish_timeout, self.sampler.retire(version.policy), unless=self.down
            )
        except Interrupted:
            return
        except Exception as error:  # noqa: BLE001
            self.fail("unhealthy", f"it did not retire {version.policy}: {said(error)}")

    async def rest(self, deed: Literal["sleep", "wake"]) -> None:
        """Sleep or wake. An engine that does not is taken out."""
        try:
            await run_with_deadline(self._settings.publish_timeout, getattr(self.sampler, deed)(), unless=self.down)
        except Interrupted:
            return
        except Exception as error:  # noqa: BLE001
            self.fail("unhealthy", f"it did not {deed}: {said(error)}")

    async def _probe(self) -> str | None:
        wrong = await self._wrong()
        if wrong is not None:
            self.fail("unhealthy", wrong)
        return wrong

    async def _wrong(self) -> str | None:
        before, arriving = self._published.served(), self._arriving
        try:
            self.info = await run_with_deadline(self._settings.health_timeout, self.sampler.info(), unless=self.down)
        except Interrupted as gone:
            return str(gone)
        except TimeoutError:
            return f"it did not answer a health check within {self._settings.health_timeout} s"
        except Exception as error:  # noqa: BLE001
            return said(error)
        now, served = self._published.served(), self.info.served
        stable = [key for key in before if now.get(key) == before[key] and key in self.versions]
        expected = {key: before[key] for key in stable if not self._replaced(key, served, arriving)}
        missing = differences(expected, served)
        return f"it has lost what was published: {'; '.join(missing)}" if missing else None

    def _replaced(self, key: str, served: Collection[str], arriving: Version | None) -> bool:
        """Full weights whose successor is served, or on its way: engines may hold those of one version only."""
        order = list(self.versions)
        later = [self.versions[k] for k in order[order.index(key) + 1 :] if k in served]
        later += [version for version in (arriving, self._arriving) if version is not None]
        return any(_succeeds(version, self.versions[key]) for version in later)


def _succeeds(later: Version, earlier: Version) -> bool:
    return later.lora is None and earlier.lora is None and later.policy.name == earlier.policy.name


def said(error: BaseException) -> str:
    """An error in a line that goes on."""
    if isinstance(error, CotuneError):
        return error.cause.rstrip(".")
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return f"{type(error).__name__}: {error}"
