"""One sampler over several engines: prefix affinity, retries, restarts, and the same versions on all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from cotune.errors import CotuneError, LearnerLost, RequestRefused, SamplerError, SampleTimeout, SyncError, error_line
from cotune.integrations.cluster.router import limits
from cotune.integrations.cluster.router.queue import Queue, Request
from cotune.integrations.cluster.router.replica import Artifact, Engine, Make, Replica, TakenOut
from cotune.integrations.cluster.router.validate import validate_completions
from cotune.integrations.models.engine_sampler import LoopSampler
from cotune.integrations.models.served_versions import Version
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, RemoteWeights, SamplerInfo, SamplingParams, Weights, fingerprint

_COUNTER_OF_ERROR = {SampleTimeout: "late", RequestRefused: "refused", asyncio.CancelledError: "cancelled"}
"""Error of an unanswered request -> its counter; for any other error the counter is "failed"."""


class NoEngine(Exception):
    """No engine is healthy at this moment."""


class AttemptFailed(Exception):
    """An engine failed a request. `counter` counts such failures. `error` is the engine's own error, if it raised
    one."""

    def __init__(self, counter: str, reason: str, error: Exception | None = None) -> None:
        self.counter = counter
        self.error = error
        super().__init__(reason)


class RoutedSampler(LoopSampler):
    """The `Sampler` protocol over replicas of one engine; made by `open`.

    For a cluster, `start_sampler` hosts one in an actor, so that all processes share one view of load and health.

    A request goes to the engine that has seen its prefix, unless others are much less loaded. An engine that dies,
    hangs or answers garbage is taken out and restarted; it takes requests again once all published versions are loaded.
    Its requests are given to other engines, with the same policy version. The router keeps the weights of all live
    versions for restarts: adapters themselves, and a reference to full weights that are still with the learner.
    """

    takes_remote_weights = True

    def __init__(
        self, makes: Sequence[Make], min_healthy: int, max_restarts: int, health_timeout: float, vocabulary: int | None
    ) -> None:
        """A sampler that spreads requests over engines.

        Args:
            makes: one function for each engine, which starts it.
            min_healthy: number of engines below which requests wait.
            vocabulary: number of token ids that the engines know, to refuse others.
        """
        super().__init__()
        self.counters: Counter[str] = Counter()
        self._vocabulary = vocabulary
        self._replicas = [
            Replica(
                f"engine-{i}", make, self._versions, self.counters, self._changed,
                max_restarts=max_restarts, health_timeout=health_timeout,
            )
            for i, make in enumerate(makes)
        ]  # fmt: skip
        self._queue = Queue(self._replicas, min_healthy, self.counters)
        self._supervisors: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        makes: Sequence[Make],
        *,
        min_healthy: int = 1,
        max_restarts: int = 3,
        health_timeout: float = 60.0,
        vocabulary: int | None = None,
    ) -> RoutedSampler:
        """Start the engines and wait until each has started or failed, and enough are healthy.

        Each of `makes` is an async function without arguments that opens the Sampler of one engine. It also restarts
        that engine, at most `max_restarts` times. Requests wait while fewer than `min_healthy` engines are healthy. An
        engine that does not answer a health check within `health_timeout` seconds is unhealthy. `vocabulary` is the
        number of token ids; an answer with other ids is garbage (None: not checked).

        Raises ConfigError if an engine's configuration is wrong, EngineLost if too few engines can be started.
        """
        router = cls(makes, min_healthy, max_restarts, health_timeout, vocabulary)
        return await router._open_or_close(router._open())

    async def _open(self) -> None:
        self._supervisors = [asyncio.create_task(replica.supervise()) for replica in self._replicas]
        await self._queue.until(self._all_started_or_failed)
        await self._queue.wait_for_enough_engines()

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates, together on one engine.

        Raises RequestRefused, SampleTimeout, EngineLost if too few engines are left, and SamplerError with all attempts
        if none succeeded.
        """
        self.counters["requests"] += 1
        try:
            answer = await super().sample(prompt_token_ids, n, params, policy)
        except BaseException as error:
            outcome = "failed"
            for kind, counter in _COUNTER_OF_ERROR.items():
                if isinstance(error, kind):
                    outcome = counter
                    break
            self.counters[outcome] += 1
            raise
        self.counters["answered"] += 1
        return answer

    async def _sleep(self, keep_weights: bool) -> None:
        async with self._versions.lock:
            await self._order("sleep", keep_weights)

    async def _wake(self) -> None:
        async with self._versions.lock:
            # An engine whose weights have changed meanwhile fails to wake and is taken out.
            await self._order("wake")

    async def _info(self) -> SamplerInfo:
        """The versions that every healthy engine serves, and the shortest of the context lengths."""
        self._queue.check()
        names = Counter(replica.info.name for replica in self._replicas if replica.info is not None)
        return SamplerInfo(
            name=f"router over {', '.join(f'{count} {name}' for name, count in names.items())}",
            max_model_len=self.max_model_len,
            served=self._versions.served(),
            counters=self.counters.copy(),
        )

    async def _close(self) -> None:
        for replica in self._replicas:
            replica.close()
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(replica.end() for replica in self._replicas))

    async def _generate(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef, target: Any
    ) -> list[Completion]:
        """Give the request to one engine after another until one answers."""
        # The caller's time-out has been running since the request arrived, and ends all attempts together.
        request = Request(tuple(prompt), n, msgspec.structs.replace(params, timeout=None), policy)
        failures: list[tuple[Engine, AttemptFailed]] = []
        while len(failures) < limits.ATTEMPTS:
            engine = await self._queue.place(request)
            if failures:
                self.counters["retried"] += 1
            try:
                answer = await self._attempt(engine, request)
            except AttemptFailed as failure:
                self.counters[failure.counter] += 1
                failures.append((engine, failure))
                request.tried.add(engine)
                _refuse_if_two_agree(request, failures)
            else:
                engine.faults = 0
                _count_faults(failures)
                return answer
            finally:
                self._queue.leave(request, engine)
        _count_faults(failures)
        attempts = "; ".join(f"{engine.name}: {failure}" for engine, failure in failures)
        raise SamplerError(
            f"{request.policy} was not answered in {len(failures)} attempts: {attempts}.", "Read the engines' logs."
        )

    async def _attempt(self, engine: Engine, request: Request) -> list[Completion]:
        """The valid answer of one engine. Raises AttemptFailed, RequestRefused."""
        work = engine.sampler.sample(request.prompt, request.n, request.params, request.policy)
        try:
            answer = await engine.within(limits.REQUEST_SECONDS, work)
        except TakenOut as gone:
            self._queue.check()
            raise AttemptFailed("died", str(gone)) from None
        except Exception as error:
            # An unhealthy engine is the cause of its error; a healthy one may be right to refuse the request.
            engine_fault = await engine.probe()
            if engine_fault is not None:
                raise AttemptFailed("died", f"{error_line(error)} ({engine_fault})") from None
            if isinstance(error, RequestRefused):
                raise
            if isinstance(error, TimeoutError | SampleTimeout):
                raise AttemptFailed("timeouts", f"no answer within {limits.REQUEST_SECONDS:g} s") from None
            raise AttemptFailed("errors", error_line(error), error) from None
        answer_fault = validate_completions(answer, request.n, request.params.max_tokens, self._vocabulary)
        if answer_fault is not None:
            raise AttemptFailed("garbage", f"garbage, {answer_fault}")
        return answer

    async def _publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> str:
        """Serve `policy` on all engines, and on engines that start later.

        Raises SyncError if an engine reports another fingerprint or some engines refuse, RequestRefused if all refuse,
        LearnerLost if the weights cannot be read any more, EngineLost.
        """
        # The caller may change its arrays later, and an engine that starts later must get the same weights.
        unchangeable_weights = frozen_weights(weights)
        while True:
            await self._queue.wait_for_enough_engines()
            try:
                return await super()._publish(policy, unchangeable_weights, lora)
            except NoEngine:
                continue  # all engines were taken out meanwhile: wait until enough of them are back

    async def _load(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> Version:
        """Load a version on all healthy engines. If one rejects it, remove it from the others and raise its error."""
        version = Version(policy, await asyncio.to_thread(fingerprint, weights), Artifact(weights, lora))
        engines = self._queue.healthy()
        outcomes = await asyncio.gather(*(self._publish_to(engine, version) for engine in engines))
        errors: dict[str, CotuneError] = {}
        holders: list[Engine] = []
        for engine, error in zip(engines, outcomes, strict=True):
            # The outcome of an engine that was taken out meanwhile does not matter, because the engine that replaces it
            # loads the version again. It does matter if the weights were lost with the learner: nobody can load them.
            if not engine.healthy and not isinstance(error, LearnerLost):
                continue
            if error is not None:
                errors[engine.name] = error
            # After a SyncError the engine holds the version too, but with other weights.
            if error is None or isinstance(error, SyncError):
                holders.append(engine)
        if holders and not errors:
            return version

        # A version is served by all engines or by none.
        await asyncio.gather(*(engine.order("retire", policy) for engine in holders))
        if not errors:
            raise NoEngine
        raise _rejection(version, errors, by_all=not holders)

    async def _unload(self, version: Version) -> None:
        await self._order("retire", version.policy)

    async def _drop(self, version: Version) -> None:
        async with self._versions.lock:
            await super()._drop(version)

    async def _publish_to(self, engine: Engine, version: Version) -> CotuneError | None:
        """The error of a healthy engine that does not serve the version; None if it does, or was taken out."""
        try:
            await engine.publish(version)
        except TakenOut:
            return None
        except TimeoutError as error:
            engine.fail("unhealthy", f"{version.policy} could not be published: {error_line(error)}")
            return None
        except Exception as error:  # noqa: BLE001
            await engine.probe()
            return error if isinstance(error, CotuneError) else SamplerError(error_line(error))
        return None

    async def _order(self, method: str, *arguments: Any) -> None:
        await asyncio.gather(*(engine.order(method, *arguments) for engine in self._queue.healthy()))

    def _all_started_or_failed(self) -> bool:
        """Whether the first start of every engine has succeeded or failed. Raises ConfigError."""
        refused = next((replica.refused for replica in self._replicas if replica.refused), None)
        if refused is not None:
            raise refused
        return all(replica.state != "starting" for replica in self._replicas)

    def _changed(self) -> None:
        lengths = [replica.info.max_model_len for replica in self._replicas if replica.info is not None]
        self.max_model_len = min(lengths, default=0)
        self._queue.on_replica_change()


def _rejection(version: Version, errors: Mapping[str, CotuneError], *, by_all: bool) -> CotuneError:
    """The error to raise for a version that engines rejected. `errors` are their errors by engine name."""
    for error in errors.values():
        if isinstance(error, LearnerLost):
            return error  # the run can go back to its last checkpoint
    if by_all:
        return next(iter(errors.values()))  # the version is wrong, and the error of any engine tells why
    reasons = "; ".join(f"{name}: {error_line(error)}" for name, error in errors.items())
    return SyncError(
        f"{version.policy} with fingerprint {version.fingerprint} is not served by all engines, so by none: {reasons}.",
        "Read the logs of the engines named.",
    )


def _count_faults(failures: Sequence[tuple[Engine, AttemptFailed]]) -> None:
    """Count the failures of a request as faults of the engines: another engine served it, or the cause is unknown."""
    for engine, failure in failures:
        if failure.counter != "died":
            engine.count_fault(f"{failure} ({failure.counter})")


def _refuse_if_two_agree(request: Request, failures: Sequence[tuple[Engine, AttemptFailed]]) -> None:
    """Raise RequestRefused if two healthy engines failed with the request: then the cause is the request, not an
    engine.
    """
    error_of_engine = {engine: failure.error for engine, failure in failures if failure.error is not None}
    if len(error_of_engine) < 2:
        return
    error = list(error_of_engine.values())[-1]
    if isinstance(error, CotuneError):
        raise RequestRefused(error.cause, error.remedy) from error
    raise RequestRefused(
        f"{request.policy} refuses this request: {error_line(error)}.",
        "Correct the request: two healthy engines raise this error for it.",
    ) from error


def frozen_weights(weights: Weights) -> Weights:
    """Weights that nobody can change: writable arrays are copied. Arrays from Ray and remote weights are read-only
    already."""
    if isinstance(weights, RemoteWeights):
        return weights
    return {name: np.array(array) if array.flags.writeable else array for name, array in weights.items()}
