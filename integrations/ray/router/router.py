"""The router over several engines, in one event loop: attempts, retries, publishing to all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from cotune.errors import CotuneError, RequestRefused, SamplerError, SampleTimeout, SyncError
from cotune.integrations.ray.router.deadline import CancelledByItself, Interrupted, run_with_deadline
from cotune.integrations.ray.router.engine import Engine, said
from cotune.integrations.ray.router.latency import slow
from cotune.integrations.ray.router.queue import Queue, Request
from cotune.integrations.ray.router.replica import Make, Replica
from cotune.integrations.ray.router.settings import COUNTERS, RouterSettings, RouterStats
from cotune.integrations.ray.router.validate import validate_completions
from cotune.integrations.ray.router.versions import Published, Version, keep
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights, fingerprint

log = logging.getLogger(__name__)

T = TypeVar("T")

EVENTS = 200
"""How many of the last events are kept."""


class Failed(Exception):
    """An engine failed a request. `kind` is the counter, `error` what the engine itself raised, if anything."""

    def __init__(self, kind: str, reason: str, error: Exception | None = None) -> None:
        self.kind = kind
        self.error = error
        super().__init__(reason)


class Router:
    """The `Sampler` protocol over replicas. All its methods belong to the event loop that it was made in."""

    def __init__(self, makes: Sequence[Make], settings: RouterSettings, on_event: Callable[[str], None] | None) -> None:
        settings.check(len(makes))
        self.settings = settings
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.events: deque[str] = deque(maxlen=EVENTS)
        self._on_event = on_event
        self._published = Published(lambda version: self._spawn(self._drop(version)))
        self._replicas = [
            Replica(f"engine-{i}", make, settings, self._published, self.counters, self._say, self._changed)
            for i, make in enumerate(makes)
        ]
        self._queue = Queue(self._replicas, settings, self.counters, self._say)
        self._tickets = 0
        self._supervisors: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start all engines and wait until each has started or failed to, and enough are healthy.

        Raises ConfigError when an engine's configuration is wrong, EngineLost when too few can be started.
        """
        self._supervisors = [asyncio.create_task(replica.supervise()) for replica in self._replicas]
        try:
            await self._queue.until(self._begun)
            await self._queue.floor()
        except BaseException:
            await self.aclose()
            raise
        self._spawn(self._watch_pace())

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates. Raises RequestRefused, SampleTimeout, SamplerError with all attempts, EngineLost."""
        self.counters["requests"] += 1
        self._tickets += 1
        request = Request(self._tickets, tuple(prompt_token_ids), n, params, policy, self.settings.block_tokens)
        try:
            self._published.enter(policy)
            try:
                async with asyncio.timeout(params.timeout):
                    answer = await self._answer(request)
            finally:
                self._published.leave(policy)
        except TimeoutError:
            self._late(request)
            raise SampleTimeout(
                f"{policy} did not answer within {params.timeout} s.",
                "Raise the time-out, lower max_tokens, or run fewer requests at once.",
            ) from None
        except RequestRefused:
            self.counters["refused"] += 1
            raise
        except asyncio.CancelledError:
            self.counters["cancelled"] += 1
            raise
        except BaseException:
            self.counters["failed"] += 1
            raise
        self.counters["answered"] += 1
        return answer

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Serve `policy` on all engines, and on those that are started later; return its fingerprint.

        Goes on to its end when the caller is cancelled. Raises SyncError when an engine answers with another
        fingerprint or alone refuses, RequestRefused when all refuse, EngineLost.
        """
        own = keep(weights)
        version = Version(policy, own, lora, await asyncio.to_thread(fingerprint, own))
        return await self._finish(self._publish(version))

    async def retire(self, policy: PolicyRef) -> None:
        """Refuse new requests at once; engines drop the version when the ones that were accepted have ended."""
        version = self._published.retire(policy)
        if version is not None:
            await self._finish(self._drop(version))

    async def rest(self, deed: Literal["sleep", "wake"]) -> None:
        """Let all engines sleep, or wake them; one that cannot is taken out."""
        await self._finish(self._rest(deed))

    async def _rest(self, deed: Literal["sleep", "wake"]) -> None:
        async with self._published.lock:
            await asyncio.gather(*(engine.rest(deed) for engine in self._queue.healthy()))

    async def info(self) -> SamplerInfo:
        """What every engine serves once it is healthy; the shortest of their context lengths."""
        self._queue.check()
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        names = Counter(info.name for info in infos)
        return SamplerInfo(
            name=f"router over {', '.join(f'{count} {name}' for name, count in names.items())}",
            max_model_len=min(info.max_model_len for info in infos),
            served=self._published.served(),
            counters=dict(self.counters),
        )

    def stats(self) -> RouterStats:
        return RouterStats(
            counters=dict(self.counters),
            replicas={replica.name: replica.stats() for replica in self._replicas},
            waiting=len(self._queue),
            events=tuple(self.events),
        )

    async def aclose(self) -> None:
        """Fail what is pending and end all engines. Safe to call twice."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for replica in self._replicas:
            replica.close()
        self._queue.close()
        for task in [*self._supervisors, *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._supervisors, *self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.end() for replica in self._replicas))

    async def _answer(self, request: Request) -> list[Completion]:
        """Give the request to one engine after another until one answers."""
        failures: list[str] = []
        doubts: list[tuple[Engine, Failed]] = []
        while len(failures) < self.settings.max_attempts:
            engine = await self._queue.place(request)
            if failures:
                self.counters["retried"] += 1
            try:
                answer = await self._attempt(engine, request)
            except Failed as failure:
                failures.append(f"{engine.name}: {failure}")
                request.tried.add(engine)
                self.counters[failure.kind] += 1
                if failure.error is None:
                    self._blame(engine, failure)
                else:
                    doubts.append((engine, failure))
                    self._refuse_if_all_agree(request, doubts)
            else:
                engine.well(self._since(request), max(len(c.token_ids) for c in answer))
                self._settle(doubts)
                return answer
            finally:
                self._queue.leave(request)
        self._settle(doubts)
        raise SamplerError(
            f"{request.policy} was not answered in {len(failures)} attempts: {'; '.join(failures)}.",
            "Read the engines' logs.",
        )

    async def _attempt(self, engine: Engine, request: Request) -> list[Completion]:
        """One engine's answer, if it is one. Raises Failed, RequestRefused; SampleTimeout of the caller's own."""
        own, patience = request.params.timeout, self.settings.request_timeout
        limit = patience if own is None else min(own, patience)
        params = msgspec.structs.replace(request.params, timeout=limit)
        try:
            work = engine.sampler.sample(request.prompt, request.n, params, request.policy)
            answer = await run_with_deadline(patience, work, unless=engine.down)
        except Interrupted as gone:
            self._queue.check()
            raise Failed("died", str(gone)) from None
        except RequestRefused as error:
            wrong = await engine.probe()
            if wrong is None:
                raise
            raise Failed("died", f"{said(error)} ({wrong})") from None
        except CancelledByItself:
            raise Failed("errors", "it cancelled the request by itself") from None
        except (TimeoutError, SampleTimeout):
            if limit == own:
                raise TimeoutError from None
            self._spawn(engine.probe())
            raise Failed("timeouts", f"no answer within {patience} s") from None
        except Exception as error:  # noqa: BLE001
            wrong = await engine.probe()
            if wrong is None:
                raise Failed("errors", said(error), error) from None
            raise Failed("died", f"{said(error)} ({wrong})") from None
        wrong = validate_completions(answer, request.n, request.params.max_tokens, self.settings.vocabulary)
        if wrong is not None:
            raise Failed("garbage", f"garbage, {wrong}")
        return answer

    def _since(self, request: Request) -> float:
        return asyncio.get_running_loop().time() - request.given

    def _blame(self, engine: Engine, failure: Failed) -> None:
        if failure.kind != "died":
            engine.fault(failure.kind, str(failure))

    def _settle(self, doubts: Sequence[tuple[Engine, Failed]]) -> None:
        """The request was not to blame for these errors: others could serve it, or nobody could say."""
        for engine, failure in doubts:
            engine.fault(failure.kind, str(failure))

    def _refuse_if_all_agree(self, request: Request, doubts: Sequence[tuple[Engine, Failed]]) -> None:
        """Two healthy engines, or the only one twice, that raise an error: it is the request's own."""
        if len(doubts) < 2:
            return
        for engine, failure in doubts:
            engine.doubt(str(failure))
        error = doubts[-1][1].error
        if isinstance(error, CotuneError):
            raise RequestRefused(error.cause, error.remedy) from error
        raise RequestRefused(
            f"{request.policy} cannot be asked for this: {said(error)}.",
            "Every engine that was asked raises it, and is healthy otherwise.",
        ) from error

    def _late(self, request: Request) -> None:
        self.counters["late"] += 1
        if request.engine is not None:
            request.engine.late(self._since(request))

    async def _publish(self, version: Version) -> str:
        while True:
            await self._queue.floor()
            async with self._published.lock:
                if self._published.known(version.policy, version.fingerprint):
                    return version.fingerprint
                engines = self._queue.healthy()
                outcomes = await asyncio.gather(*(self._publish_to(engine, version) for engine in engines))
                if any(outcome == "served" for outcome in outcomes) and all(
                    outcome in ("served", "down") for outcome in outcomes
                ):
                    self._published.add(version)
                    return version.fingerprint
                await asyncio.gather(*(engine.withdraw(version) for engine in engines))
            self._raise_unpublished(version, engines, outcomes)

    async def _publish_to(self, engine: Engine, version: Version) -> str | CotuneError:
        """ "served", "down" when the engine was taken out meanwhile, or why it is not served."""
        try:
            arrived = await engine.publish(version)
        except (Interrupted, TimeoutError) as error:
            engine.fail("unhealthy", f"{version.policy} could not be published: {said(error)}")
            return "down"
        except Exception as error:  # noqa: BLE001
            if await engine.probe() is not None:
                return "down"
            return error if isinstance(error, CotuneError) else SamplerError(said(error))
        if arrived is None:
            return "served"
        return SyncError(f"it arrived with fingerprint {arrived}")

    def _raise_unpublished(
        self, version: Version, engines: Sequence[Engine], outcomes: Sequence[str | CotuneError]
    ) -> None:
        """What stands against serving the version; nothing when only engines that are down did not take it."""
        errors = {e.name: o for e, o in zip(engines, outcomes, strict=True) if isinstance(o, CotuneError)}
        refusals = [error for error in errors.values() if not isinstance(error, SyncError)]
        if not errors:
            return
        if len(refusals) == len(errors) and "served" not in outcomes:
            raise refusals[0]
        reasons = "; ".join(f"{name}: {error.cause}" for name, error in errors.items())
        raise SyncError(
            f"{version.policy} with fingerprint {version.fingerprint} is not served by all engines, so by none: "
            f"{reasons}.",
            "Read the logs of the engines named.",
        )

    async def _drop(self, version: Version) -> None:
        async with self._published.lock:
            self._published.forget(version)
            await asyncio.gather(*(engine.withdraw(version) for engine in self._queue.healthy()))

    async def _watch_pace(self) -> None:
        """Take out what is many times slower than the others, as long as enough engines are left."""
        while True:
            await asyncio.sleep(self.settings.health_every)
            engines = {engine.name: engine for engine in self._queue.healthy()}
            paces = {name: engine.pace for name, engine in engines.items()}
            for name, figures in slow(paces, self.settings.slow_factor, self.settings.slow_seconds).items():
                if len(self._queue.healthy()) > self.settings.min_healthy:
                    engines[name].fail("slow", figures)

    def _begun(self) -> bool:
        """Every engine's first start is over."""
        refused = next((replica.refused for replica in self._replicas if replica.refused), None)
        if refused is not None:
            raise refused
        return all(replica.state != "starting" for replica in self._replicas)

    def _changed(self) -> None:
        self._queue.changed()

    def _say(self, text: str) -> None:
        log.warning("%s", text)
        self.events.append(text)
        if self._on_event is not None:
            try:
                self._on_event(text)
            except Exception:
                log.exception("The listener to the router's events failed.")

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that goes on to its end when the caller is cancelled."""
        task = self._spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._queue.check()
            raise

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()
