"""One replica of the router. It starts an engine, checks its health, and restarts it after a fault."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

from cotune.errors import ConfigError, LearnerLost, RequestRefused, SamplerError, error_line
from cotune.integrations.cluster.router import limits
from cotune.integrations.models.engine_sampler import BY_FILES
from cotune.integrations.models.served_versions import Version, Versions
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import RemoteWeights, Sampler, SamplerInfo, Weights, publish_verified

log = logging.getLogger(__name__)

T = TypeVar("T")

Make = Callable[[], Coroutine[Any, Any, Sampler]]


class Artifact(NamedTuple):
    """Weights of a version, kept for engines that start later."""

    weights: Weights
    lora: LoraSpec | None


class TakenOut(Exception):
    """The engine was taken out while somebody waited for it."""


class Engine:
    """A sampler from its start to its first serious fault; a restart makes a new one. Belongs to one event loop.

    `down` is a future that gets the reason when the engine is taken out.
    `health_timeout` is the number of seconds that a health check may take.
    """

    def __init__(
        self,
        name: str,
        sampler: Any,
        versions: Versions,
        counters: Counter[str],
        health_timeout: float,
        on_failure: Callable[[str], None],
        by_files_only: bool = False,
    ) -> None:
        """An engine in use. `on_failure` is called with the name of a counter when the engine is taken out."""
        self.name = name
        self.sampler = sampler
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.running = 0
        """Number of requests in progress."""
        self.load = 0
        """Most tokens that the requests in progress may take."""
        self.idle_since = 0
        """Number of its latest request, in the order of all requests. The smallest one has waited longest."""
        self.faults = 0
        """Failed requests since its last good answer."""
        self.published_by_files = 0
        """How often the engine, by its latest info, got weights as files that the learner could have sent."""
        self.by_files_only = by_files_only
        """Whether this process reads the learner's weights and passes them on as files, because the learner failed to
        send some to the engine."""
        self._versions = versions
        self._counters = counters
        self._health_timeout = health_timeout
        self._on_failure = on_failure

    @property
    def healthy(self) -> bool:
        return not self.down.done()

    def fail(self, kind: str, reason: str) -> None:
        """Take the engine out; `kind` is the counter. Later calls have no effect."""
        if self.healthy:
            self.down.set_result(reason)
            self._on_failure(kind)

    def count_fault(self, reason: str) -> None:
        """Count a request that failed by the engine's fault. Too many in a row take the engine out."""
        log.warning("Engine %s: %s.", self.name, reason)
        self.faults += 1
        if self.faults >= limits.FAULTS_IN_A_ROW:
            self.fail("faulty", f"{self.faults} requests in a row failed; the last one: {reason}")

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, a call of this engine's sampler.

        Raises TimeoutError after so many seconds, TakenOut if the engine is taken out meanwhile, and the errors of
        `work`. After a TimeoutError or TakenOut, `work` is cancelled.
        """
        task = asyncio.ensure_future(work)
        work_or_down: set[asyncio.Future[Any]] = {task, self.down}
        try:
            await asyncio.wait(work_or_down, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # no effect on a task that has ended; any other is cancelled at the next await, not yet here
        if task.cancelled():
            raise SamplerError("It cancelled the request by itself.")
        if task.done():
            return task.result()
        # The work is still running. Either the engine was taken out, or the time is over.
        if not self.healthy:
            raise TakenOut(self.down.result())
        raise TimeoutError(f"no answer within {seconds:g} s")

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the sampler other than `sample`. Raises the same errors as `within`."""
        return await self.within(limits.CONTROL_SECONDS, getattr(self.sampler, method)(*arguments))

    async def order(self, method: str, *arguments: Any) -> None:
        """Call a method of the sampler other than `sample`; an error takes the engine out."""
        try:
            await self.ask(method, *arguments)
        except TakenOut:
            return  # its successor gets the present versions when it starts
        except Exception as error:  # noqa: BLE001
            command = " ".join([method, *map(str, arguments)])
            self.fail("unhealthy", f"it did not {command}: {error_line(error)}")

    async def publish(self, version: Version) -> None:
        """Serve a version. Raises SyncError if it arrives altered, and the same errors as `within`."""
        artifact: Artifact = version.target
        weights = artifact.weights
        if isinstance(weights, RemoteWeights):
            if not self.by_files_only:
                await self._publish_remote(version)
                return
            # The learner failed to send weights to this engine before, so this process fetches the arrays for it.
            self._counters[BY_FILES] += 1
            weights = await self.within(limits.CONTROL_SECONDS, asyncio.to_thread(dict, weights))
        await self._publish(version, weights, artifact.lora)

    async def _publish(self, version: Version, weights: Weights, lora: LoraSpec | None) -> None:
        work = publish_verified(self.sampler, version.policy, weights, lora, version.fingerprint)
        await self.within(limits.CONTROL_SECONDS, work)

    async def _publish_remote(self, version: Version) -> None:
        """Serve a version whose weights the learner sends to the engine. After a failure, later versions are read by
        this process instead (`by_files_only`).
        """
        artifact: Artifact = version.target
        try:
            await self._publish(version, artifact.weights, artifact.lora)
        except RequestRefused:
            raise  # the engine works, and does not take this version
        except Exception as error:
            # A lost learner sends nothing, but the next one may.
            self.by_files_only = not isinstance(error, LearnerLost)
            # The engine may have used files by itself, and `info` counts that. An engine that cannot be asked is
            # counted as one that has used files.
            try:
                await self.info()
            except Exception:  # noqa: BLE001
                self._counters[BY_FILES] += 1
            raise
        # Count the use of files here too. The version is served in any case, and the next info has the count as well.
        with suppress(Exception):
            await self.info()

    async def info(self) -> SamplerInfo:
        """Ask the sampler for its info, and count its publications by files since the last answer. Raises the same
        errors as `within`."""
        info = await self.within(self._health_timeout, self.sampler.info())
        by_files = info.counters.get(BY_FILES, 0)
        self._counters[BY_FILES] += by_files - self.published_by_files
        self.published_by_files = by_files
        return info

    async def probe(self) -> str | None:
        """Check that the engine answers and serves all published versions. Returns the fault, which takes the engine
        out; None for a healthy engine.
        """
        expected_before = _expected_fingerprints(self._versions)
        try:
            info = await self.info()
            expected_after = _expected_fingerprints(self._versions)
            lost_versions = _describe_lost_versions(info.served, expected_before, expected_after)
        except TakenOut as gone:
            return str(gone)
        except TimeoutError:
            fault = f"it did not answer a health check within {self._health_timeout} s"
        except Exception as error:  # noqa: BLE001
            fault = error_line(error)
        else:
            if not lost_versions:
                return None
            fault = f"it has lost what was published: {'; '.join(lost_versions)}"
        self.fail("unhealthy", fault)
        return fault


class Replica:
    """Keeps one engine running: it restarts the engine at most `max_restarts` times, failed starts included.

    Its `state` is starting, healthy, failed (to be restarted), lost (restarts used up) or closed. `changed` is called
    after every change of state.
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
        """A place for an engine, which is started again after a failure, at most `max_restarts` times.

        Args:
            make: starts an engine.
            versions: the published versions, which a new engine gets.
            changed: called after each change of the state.
        """
        self.name = name
        self.state: Literal["starting", "healthy", "failed", "lost", "closed"] = "starting"
        self.engine: Engine | None = None
        self.refused: ConfigError | None = None
        """The error of the first start if no start can succeed."""
        self.fault = ""
        """The reason why its engine was taken out, or did not start, the last time."""
        self.info: SamplerInfo | None = None
        """The info of its engine at its start."""
        self._restarts = 0
        self._by_files_only = False
        """See `Engine.by_files_only`: it stays with all later engines."""
        self._make = make
        self._versions = versions
        self._counters = counters
        self._changed = changed
        self._max_restarts = max_restarts
        self._health_timeout = health_timeout

    async def supervise(self) -> None:
        """Start an engine, and restart it after each end until the restarts are used up. The router cancels this when
        it closes.
        """
        while True:
            try:
                await self._start()
            except Exception as error:  # noqa: BLE001
                # A wrong configuration at the first start will not become right.
                if isinstance(error, ConfigError) and self.state == "starting":
                    self.refused = error
                    self._lose(error_line(error))
                    return
                if isinstance(error, TimeoutError) and self.engine is None:
                    reason = f"it did not start within {limits.START_SECONDS:g} s"
                else:
                    reason = f"it did not start: {error_line(error)}"
                self._change_state("failed", reason, counter="failed_starts", event="is not there")
            else:
                await self._watch()
            await self.end()
            if self._restarts >= self._max_restarts:
                self._lose(f"{self.fault} (after {self._restarts} restarts)")
                return
            pause = min(limits.BACKOFF * 2**self._restarts, limits.MAX_BACKOFF)
            self._restarts += 1
            self._counters["restarts"] += 1
            restarts_text = f"{self._restarts} of {self._max_restarts}"
            log.warning("Engine %s is restarted in %.3g s (%s).", self.name, pause, restarts_text)
            await asyncio.sleep(pause)

    async def end(self) -> None:
        """End the engine, if there is one. An error is only logged."""
        engine = self.engine
        self.engine = None
        if engine is not None:
            self._by_files_only = engine.by_files_only
            try:
                async with asyncio.timeout(limits.CLOSE_SECONDS):
                    await engine.sampler.aclose()
            except Exception as error:  # noqa: BLE001
                log.warning("Engine %s failed while it ended: %s.", self.name, error_line(error))

    def close(self) -> None:
        """Take the engine out: it gets no more requests, and its present ones fail."""
        engine = self.engine
        self.state = "closed"
        if engine is not None:
            engine.fail("", "the sampler was closed")

    async def _start(self) -> None:
        """Start an engine, and publish all versions to it before it gets requests."""
        async with asyncio.timeout(limits.START_SECONDS):
            sampler = await self._make()
        engine = self.engine = Engine(
            self.name,
            sampler,
            self._versions,
            self._counters,
            self._health_timeout,
            self._taken_out,
            by_files_only=self._by_files_only,
        )
        async with self._versions.lock:
            versions = self._versions.all()
            for version in versions:
                await engine.publish(version)
            self.info = await engine.info()
            if self.state == "failed":
                log.warning("Engine %s is back, with %d published versions.", self.name, len(versions))
            self.state = "healthy"
        self._changed()

    async def _watch(self) -> None:
        """Check the engine's health until it is taken out. A long healthy time resets the number of restarts."""
        engine = self.engine
        since = asyncio.get_running_loop().time()
        assert engine is not None
        while engine.healthy:
            await asyncio.wait({engine.down}, timeout=limits.HEALTH_EVERY)
            is_well = engine.healthy and await engine.probe() is None
            if is_well and asyncio.get_running_loop().time() - since >= limits.FORGIVE_AFTER:
                self._restarts = 0

    def _taken_out(self, kind: str) -> None:
        """Note that the engine was taken out; the engine calls this once."""
        if self.state == "healthy" and self.engine is not None:
            self._change_state("failed", self.engine.down.result(), counter=kind, event="is taken out")

    def _lose(self, reason: str) -> None:
        """Give the engine up: it is not restarted."""
        self._change_state("lost", reason, counter="lost", event="is given up")

    def _change_state(self, state: Literal["failed", "lost"], reason: str, *, counter: str, event: str) -> None:
        """Change the state of a replica without an engine, and count and log the `event` with its reason."""
        self._counters[counter] += 1
        self.state = state
        self.fault = reason
        log.warning("Engine %s %s: %s.", self.name, event, reason)
        self._changed()


def _describe_lost_versions(
    served: Mapping[str, str], expected_before: Mapping[str, str], expected_after: Mapping[str, str]
) -> list[str]:
    """A phrase for each version that an engine should serve, but has lost or serves with another fingerprint.

    All arguments are fingerprints by version: of the engine's answer, and as expected before the engine was asked and
    after. A version that was published or retired in between is not compared.
    """
    phrases = []
    for version, fingerprint in sorted(expected_after.items()):
        if expected_before.get(version) != fingerprint:
            continue
        if version not in served:
            phrases.append(f"{version} is missing")
        elif served[version] != fingerprint:
            phrases.append(f"{version} has the fingerprint {served[version]} instead of {fingerprint}")
    return phrases


def _expected_fingerprints(versions: Versions) -> dict[str, str]:
    """Fingerprints of the versions that every healthy engine serves; empty while versions are published or retired.

    An engine may hold the full weights of only one version per policy, so only the last of these is expected.
    """
    if versions.lock.locked():
        return {}
    last_full_version = {}  # of each policy
    for version in versions.all():
        if version.target.lora is None:
            last_full_version[version.policy.name] = version
    expected = {}
    for version in versions.all():
        has_full_weights = version.target.lora is None
        is_replaced = has_full_weights and version is not last_full_version[version.policy.name]
        if not version.retired and not is_replaced:
            expected[str(version.policy)] = version.fingerprint
    return expected
