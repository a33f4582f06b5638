"""What samplers on asynchronous engines share: versions that drain, time-outs, closing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

import msgspec

from cotune.errors import RequestRefused, SamplerError
from cotune.integrations.models.served_versions import Version, Versions
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights, in_time

T = TypeVar("T")


class CalledSampler(ABC):
    """The `Sampler` protocol over one method that carries its calls to where the engine is."""

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of this class; a request that is cancelled here is cancelled there."""

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

    async def sleep(self, keep_weights: bool = False) -> None:
        """Finish what runs, then free the GPU until `wake`, or with `keep_weights` all of it but the weights; requests
        meanwhile wait. Raises RequestRefused where the engine cannot, SamplerError."""
        await self._call("sleep", keep_weights)

    async def wake(self) -> None:
        """Take the GPU back. Raises SamplerError, and serves nothing more, when the weights are other ones now."""
        await self._call("wake")


_TO_THEIR_END = ("publish", "retire", "sleep", "wake")
"""Calls that are not cancelled with their caller: an engine must not stop in the middle of them."""


class LoopSampler(CalledSampler):
    """The `Sampler` protocol over an engine that lives on one event loop: the one that it was opened in.

    All methods are awaited there, so what they share needs no locks; `start_sampler` hosts one for every other loop and
    process.
    """

    name: str

    def __init__(self) -> None:
        self.max_model_len = 0
        self._versions = Versions()
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._broken: SamplerError | None = None
        self._closing: asyncio.Task[None] | None = None

    @abstractmethod
    async def _generate(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef, target: Any
    ) -> list[Completion]:
        """Draw candidates; `params.max_tokens` fits the model. `target` is that of the policy's version, None for the
        base. Cancelled, it aborts."""

    @abstractmethod
    async def _load(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> Version:
        """Bring weights into the engine. Nothing is left behind when it raises."""

    @abstractmethod
    async def _unload(self, version: Version) -> None:
        """Free a version that nobody uses any more."""

    @abstractmethod
    async def _close(self) -> None:
        """Stop the engine."""

    async def aclose(self) -> None:
        """Stop the engine; pending requests fail with SamplerError. Safe to call twice."""
        if self._closing is None:
            self._broken = SamplerError("The sampler was closed.", "Open a new one.")
            self._closing = asyncio.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _opened(self, work: Coroutine[Any, Any, None]) -> Self:
        """This sampler, once `work` has opened it; closed where that fails."""
        try:
            await self._run(work)
        except BaseException:
            await asyncio.shield(self.aclose())
            raise
        return self

    async def _call(self, method: str, *arguments: Any) -> Any:
        work: Coroutine[Any, Any, Any] = getattr(self, f"_{method}")(*arguments)
        return await self._run(work, to_its_end=method in _TO_THEIR_END)

    async def _run(self, work: Coroutine[Any, Any, T], *, to_its_end: bool = False) -> T:
        """Work that is cancelled with its caller, or goes on `to_its_end`. Raises SamplerError when the sampler is
        broken or closed."""
        task = self._start(work)
        try:
            return await (asyncio.shield(task) if to_its_end else task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._broken is not None and task.cancelled() and not (caller and caller.cancelling()):
                raise SamplerError(self._broken.cause, self._broken.remedy) from None
            raise

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        if self._broken is not None:
            work.close()
            raise SamplerError(self._broken.cause, self._broken.remedy)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # somebody waits for it, or nobody does any more

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
        room = room_after(len(prompt), self.max_model_len)
        if n < 1 or params.max_tokens < 1:
            raise RequestRefused(
                f"n = {n} and max_tokens = {params.max_tokens} were asked for.", "Ask for at least 1 of both."
            )
        version = self._locate(policy)
        version.running += 1
        fitted = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
        drawn = n if params.temperature > 0 else 1  # vLLM draws one greedy candidate only; all would be equal
        try:
            return await self._generate(prompt, drawn, fitted, policy, version.target) * (n // drawn)
        finally:
            if self._versions.left(version) and self._broken is None:
                self._start(self._drop(version))

    def _locate(self, policy: PolicyRef) -> Version:
        return self._versions.locate(policy)

    async def _publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> str:
        async with self._versions.lock:
            if (known := self._versions.known(policy, weights)) is not None:
                return known
            version = await self._load(policy, weights, lora)
            self._versions.add(version)
            return version.fingerprint

    async def _retire(self, policy: PolicyRef) -> None:
        version = self._versions.retire(policy)
        if not version.running:
            await self._drop(version)

    async def _drop(self, version: Version) -> None:
        if not self._versions.holds(version):
            return  # another version took its place in the engine
        try:
            await self._unload(version)
        finally:
            self._versions.forget(version)
            self._freed.set()

    async def _info(self) -> SamplerInfo:
        return SamplerInfo(name=self.name, max_model_len=self.max_model_len, served=self._versions.served())

    async def _sleep(self, keep_weights: bool) -> None:
        raise RequestRefused(f"{self.name} cannot sleep.", "Sample with vLLM on the learner's GPU.")

    async def _wake(self) -> None:
        await self._sleep(keep_weights=False)


def room_after(prompt: int, max_model_len: int) -> int:
    """How many tokens may follow a prompt of so many. Raises RequestRefused when there is none, or no prompt."""
    if not 1 <= prompt < max_model_len:
        raise RequestRefused(
            f"The prompt has {prompt} tokens; the model takes 1 to {max_model_len - 1} and one to answer.",
            "Shorten the prompt, or use a model with a longer context.",
        )
    return max_model_len - prompt
