"""Any sampler in a Ray actor, and the `Sampler` protocol over its handle from every process of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from cotune.errors import ConfigError, CotuneError, SamplerError
from cotune.integrations.activation import NO_ACTIVATION
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplerInfo, SamplingParams, Weights, in_time

DRAIN_SECONDS = 5.0
"""How long a closed sampler's actor waits for the failures of its pending requests to be sent."""

KILL_SECONDS = 30.0
"""How long to wait until Ray says that a killed actor is gone."""


class SamplerActor:
    """What runs in the actor: one sampler, made by a factory in the actor's own process and on its event loop."""

    def __init__(self) -> None:
        # Ray hands arrays over read-only, in shared memory; no sampler writes into what it is given.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._sampler: Any = None
        self._running = 0

    async def open(self, factory: str, kwargs: Mapping[str, Any]) -> None:
        self._sampler = await resolve(factory)(**kwargs)

    async def call(self, method: str, *arguments: Any) -> Any:
        self._running += 1
        try:
            return await getattr(self._sampler, method)(*arguments)
        finally:
            self._running -= 1

    async def aclose(self) -> None:
        if self._sampler is not None:
            await self._sampler.aclose()
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


class RaySampler:
    """The `Sampler` protocol over an actor's handle; made by `start_sampler`.

    It can be pickled: every process of the cluster that has one samples from the same engine. Raises SamplerError when
    the actor is gone; errors that the sampler raises in the actor arrive as themselves.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._closed = False

    def __reduce__(self) -> tuple[type[RaySampler], tuple[Any]]:
        return RaySampler, (self._actor,)

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates from one prefill. Raises RequestRefused, SampleTimeout, SamplerError."""
        async with in_time(policy, params):
            return await self._call("sample", tuple(prompt_token_ids), n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Serve `policy` with these weights; return the fingerprint of what arrived."""
        return await self._call("publish", policy, dict(weights), lora)

    async def retire(self, policy: PolicyRef) -> None:
        """Refuse new requests of a version at once; it is freed when its running requests have ended."""
        await self._call("retire", policy)

    async def info(self) -> SamplerInfo:
        return await self._call("info")

    async def sleep(self) -> None:
        """As of the sampler in the actor, which must be able to."""
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def aclose(self) -> None:
        """Close the sampler in the actor and end the actor; pending requests fail with SamplerError."""
        if self._closed:
            return
        try:
            await self._answer(self._actor.aclose.remote())
        except SamplerError:
            pass  # it is gone already
        finally:
            self._closed = True
            await _end(self._actor)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the sampler in the actor."""
        self._check_open()
        return await self._answer(self._actor.call.remote(method, *arguments))

    async def _answer(self, answer: Any) -> Any:
        """What the actor answers; cancelled here, it is cancelled there."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer, recursive=False)
            raise
        except RayTaskError as error:
            if isinstance(error.cause, CotuneError):
                raise error.cause from None
            raise SamplerError(f"The sampler failed in its actor: {error}", "Read the error above.") from error
        except RayError as error:
            self._check_open()
            raise _gone(error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise SamplerError("The sampler was closed.", "Open a new one.")


async def start_sampler(
    factory: str,
    kwargs: Mapping[str, Any],
    *,
    num_cpus: float = 1,
    num_gpus: float = 0,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    max_concurrency: int = 10_000,
) -> RaySampler:
    """Start an actor that hosts the sampler which `factory` makes, and wait until it serves.

    `factory` is the import path of an async function, "module:function" or "module:Class.function", called with
    `kwargs` in the actor. `env` is set in the actor before anything is imported; requests above `max_concurrency` wait
    in the actor. The actor ends with the process that started it. Raises what the factory raises, ConfigError when
    `factory` cannot be imported, SamplerError when the actor dies.
    """
    import ray

    actor: Any = (
        ray.remote(SamplerActor)
        .options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            name=name,
            runtime_env={"env_vars": {**NO_ACTIVATION, **(env or {})}},
            max_concurrency=max_concurrency,
        )
        .remote()
    )
    sampler = RaySampler(actor)
    try:
        await sampler._answer(actor.open.remote(factory, dict(kwargs)))
    except BaseException:
        await asyncio.shield(_end(actor))
        raise
    return sampler


def resolve(path: str) -> Callable[..., Awaitable[Sampler]]:
    """What an import path "module:name.name" names. Raises ConfigError."""
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        return reduce(getattr, names.split("."), found)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "factory", path, f'"module:function" ({type(error).__name__}: {error})', "Correct the import path."
        ) from error


async def _end(actor: Any) -> None:
    """Kill the actor's process and wait until Ray says that it is gone."""
    import ray
    from ray.exceptions import RayError

    ray.kill(actor)
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(KILL_SECONDS):
            await actor.call.remote("info")


def _gone(error: Exception) -> SamplerError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return SamplerError(
        f"The sampler's engine is gone: {type(error).__name__}: {reason}", "Read the actor's log, then open a new one."
    )
