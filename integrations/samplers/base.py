"""What samplers on asynchronous engines share: versions that drain, time-outs, closing."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from cotune.errors import RequestRefused, SamplerError
from cotune.integrations.models.meta_model import ModelSkeleton
from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights, fingerprint, in_time

T = TypeVar("T")


@dataclass(eq=False)
class LoadedVersion:
    """A version in the engine. `target` is what the engine knows it by; `running` counts its unfinished requests."""

    target: Any
    fingerprint: str
    running: int = 0
    retired: bool = False


class LoopSampler(ABC):
    """The `Sampler` protocol over an engine that lives on one event loop: the one that it was opened in.

    All methods are awaited there, so what they share needs no locks; `start_sampler` hosts one for every other loop and
    process.
    """

    name: str

    def __init__(self, skeleton: ModelSkeleton) -> None:
        self.max_model_len = 0
        self._skeleton = skeleton
        self._served: dict[str, LoadedVersion] = {}
        self._base: LoadedVersion | None = LoadedVersion(target=None, fingerprint="")
        self._publishing = asyncio.Lock()
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._broken: SamplerError | None = None
        self._closing: asyncio.Task[None] | None = None

    @abstractmethod
    async def _generate(self, prompt: Sequence[int], n: int, params: SamplingParams, target: Any) -> list[Completion]:
        """Draw candidates; `params.max_tokens` fits the model. `target` None is the base. Cancelled, it aborts."""

    @abstractmethod
    async def _load(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> LoadedVersion:
        """Bring weights that fit the model into the engine. Nothing is left behind when it raises."""

    @abstractmethod
    async def _unload(self, served: LoadedVersion) -> None:
        """Free a version that nobody uses any more."""

    @abstractmethod
    async def _close(self) -> None:
        """Stop the engine."""

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates from one prefill. Raises RequestRefused, SampleTimeout, SamplerError."""
        async with in_time(policy, params):
            return await self._run(self._sample(prompt_token_ids, n, params, policy))

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Serve `policy` with these weights; return the fingerprint of what arrived."""
        return await self._finish(self._publish(policy, weights, lora))

    async def retire(self, policy: PolicyRef) -> None:
        """Refuse new requests of a version at once; it is freed when its running requests have ended."""
        await self._finish(self._retire(policy))

    async def info(self) -> SamplerInfo:
        return await self._run(self._info())

    async def aclose(self) -> None:
        """Stop the engine; pending requests fail with SamplerError. Safe to call twice."""
        if self._closing is None:
            self._broken = SamplerError("The sampler was closed.", "Open a new one.")
            self._closing = asyncio.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that is cancelled with its caller. Raises SamplerError when the sampler is broken or closed."""
        task = self._start(work)
        try:
            return await task
        except asyncio.CancelledError:
            self._check(task)
            raise

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that goes on to its end when its caller is cancelled. Raises as `_run`."""
        task = self._start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._check(task)
            raise

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        if self._broken is not None:
            work.close()
            raise SamplerError(self._broken.cause, self._broken.remedy)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check(self, task: asyncio.Task[Any]) -> None:
        """Raises SamplerError where it was the sampler's end that cancelled a task, and not its caller."""
        caller = asyncio.current_task()
        if self._broken is not None and task.cancelled() and not (caller and caller.cancelling()):
            raise SamplerError(self._broken.cause, self._broken.remedy) from None

    def _fail(self, error: SamplerError) -> None:
        """The engine is gone: every later request fails at once. The first reason stays."""
        self._broken = self._broken or error

    async def _end(self) -> None:
        pending = list(self._tasks)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._close()

    async def _sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        length, room = len(prompt), self.max_model_len - len(prompt)
        if not length or room < 1:
            raise RequestRefused(
                f"The prompt has {length} tokens; the model takes 1 to {self.max_model_len - 1} and one to answer.",
                "Shorten the prompt, or use a model with a longer context.",
            )
        if n < 1 or params.max_tokens < 1:
            raise RequestRefused(f"n = {n} and max_tokens = {params.max_tokens} were asked for.", "Both are 1 or more.")
        served = self._locate(policy)
        served.running += 1
        drawn = n if params.temperature > 0 else 1  # vLLM draws one greedy candidate only; all would be equal
        try:
            return await self._generate(prompt, drawn, fitted(params, room), served.target) * (n // drawn)
        finally:
            served.running -= 1
            if served.retired and not served.running and self._broken is None:
                self._start(self._drop(str(policy), served))

    def _locate(self, policy: PolicyRef) -> LoadedVersion:
        served = self._served.get(str(policy))
        if served is not None and not served.retired:
            return served
        if served is None and policy.version == 0 and self._base is not None:
            return self._base
        base = " and every unpublished policy at version 0" if self._base is not None else ""
        raise RequestRefused(
            f"{policy} is not served; served are {sorted(self._info_served())}{base}.",
            "Publish this version before sampling from it.",
        )

    async def _publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> str:
        async with self._publishing:
            known = self._served.get(str(policy))
            if known is not None:
                if not known.retired and known.fingerprint == fingerprint(weights):
                    return known.fingerprint
                raise RequestRefused(
                    f"{policy} was published before with other weights.", "Publish under a new version."
                )
            self._skeleton.check(policy, weights, lora)
            served = await self._load(policy, weights, lora)
            self._served[str(policy)] = served
            return served.fingerprint

    async def _retire(self, policy: PolicyRef) -> None:
        served = self._served.get(str(policy))
        if served is None or served.retired:
            raise RequestRefused(f"{policy} is not served, so it cannot be retired.", "Retire what was published.")
        served.retired = True
        if not served.running:
            await self._drop(str(policy), served)

    async def _drop(self, key: str, served: LoadedVersion) -> None:
        if self._served.get(key) is not served:
            return  # another version took its place in the engine
        try:
            await self._unload(served)
        finally:
            del self._served[key]
            self._freed.set()

    async def _info(self) -> SamplerInfo:
        return SamplerInfo(name=self.name, max_model_len=self.max_model_len, served=self._info_served())

    def _info_served(self) -> dict[str, str]:
        return {key: served.fingerprint for key, served in self._served.items() if not served.retired}


def fitted(params: SamplingParams, room: int) -> SamplingParams:
    """The same parameters with at most `room` tokens."""
    return params if params.max_tokens <= room else msgspec.structs.replace(params, max_tokens=room)


def spread(seed: int | None) -> int:
    """What vLLM is given as a seed: in [0, 2**62) and far from those of neighbouring seeds, or else random.

    vLLM seeds the candidates of a request with seed, seed + 1, ...: unspread, candidates of the seeds 5 and 6 would be
    the same. And on CPUs, it ignores all seeds of a batch in which one request has none.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 2
