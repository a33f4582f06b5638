"""One sampler over several engines: prefix affinity, retries, restarts, and the same versions on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from cotune.integrations.ray.router import limits
from cotune.integrations.ray.router.replica import Make
from cotune.integrations.ray.router.router import Router
from cotune.integrations.samplers.loop_thread import LoopThread
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights


class RoutedSampler:
    """The `Sampler` protocol over replicas of one engine; made by `open`.

    It lives in an event loop of its own, in a thread, so it takes requests from every loop and thread of its process.
    For a whole cluster, host one in a Ray actor: then all processes share one view of load and health.

    A request goes to the engine that has seen its prefix, unless others are much less loaded. An engine that dies,
    hangs or answers garbage is taken out and started anew, with everything that is published, before it takes requests
    again; what it was working on is given to others, with the same policy version. The weights of all live versions
    are kept here for that.
    """

    def __init__(self, thread: LoopThread, router: Router) -> None:
        self._thread = thread
        self._router = router

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
        """Start one engine with each of `makes`, an async function without arguments that opens a Sampler.

        The same function starts the engine's successors, `max_restarts` at most. Requests wait while fewer than
        `min_healthy` engines are well; one that does not answer a health check within `health_timeout` seconds is not.
        `vocabulary` is the number of token ids: ids outside it are garbage (None: not checked). Raises ConfigError,
        EngineLost.
        """
        thread = LoopThread("cotune-router")

        async def start() -> Router:
            router = Router(
                makes,
                min_healthy=min_healthy,
                max_restarts=max_restarts,
                health_timeout=health_timeout,
                vocabulary=vocabulary,
            )
            await router.open()
            return router

        try:
            return cls(thread, await thread.call(start))
        except BaseException:
            await thread.stop(_nothing, limits.CLOSE_SECONDS)
            raise

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates, together on one engine.

        Raises RequestRefused, SampleTimeout, EngineLost when too few engines are left, and SamplerError that lists the
        attempts when none succeeded.
        """
        return await self._thread.call(self._router.sample, prompt_token_ids, n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Serve `policy` on every engine; return its fingerprint.

        Raises SyncError that names the engines where something else arrived, RequestRefused, EngineLost.
        """
        return await self._thread.call(self._router.publish, policy, weights, lora)

    async def retire(self, policy: PolicyRef) -> None:
        """Refuse new requests of a version at once; it is freed when its running requests have ended."""
        await self._thread.call(self._router.retire, policy)

    async def info(self) -> SamplerInfo:
        """Facts that hold for all engines, with the router's counters. Waits while too few engines are healthy."""
        return await self._thread.call(self._router.info)

    async def sleep(self) -> None:
        """Let all engines sleep; one that fails to is taken out and started anew."""
        await self._thread.call(self._router.rest, "sleep")

    async def wake(self) -> None:
        """Wake all engines; one whose weights are not what they were is taken out and started anew."""
        await self._thread.call(self._router.rest, "wake")

    async def aclose(self) -> None:
        """Stop all engines; pending requests fail with SamplerError. Safe to call twice."""
        await self._thread.stop(self._router.aclose, limits.CLOSE_SECONDS)


async def _nothing() -> None:
    pass
