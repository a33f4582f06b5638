"""Base classes of samplers on asynchronous engines: versions that drain, time-outs, closing."""

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
from cotune.sampling.protocol import Completion, RemoteWeights, SamplerInfo, SamplingParams, Weights, in_time

T = TypeVar("T")

BY_FILES = "published_by_files"
"""The counter of publications that the learner could not send to the engine directly."""


class CalledSampler(ABC):
    """The `Sampler` protocol over one method, `_call`, that passes all calls to the engine."""

    takes_remote_weights = False
    """Whether `_call` accepts weights that are still in the learner's process. Otherwise they are fetched first."""

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine. Cancelling this call cancels the request in the engine."""

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates from one prefill. Raises RequestRefused, SampleTimeout, SamplerError."""
        async with in_time(policy, params):
            return await self._call("sample", tuple(prompt_token_ids), n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Serve `policy` with these weights; return the fingerprint of the weights that arrived."""
        if not isinstance(weights, RemoteWeights):
            weights = dict(weights)
        elif not self.takes_remote_weights:
            weights = await asyncio.to_thread(dict, weights)
        return await self._call("publish", policy, weights, lora)

    async def retire(self, policy: PolicyRef) -> None:
        """Refuse new requests of a version from now on, and free it once its running requests have ended."""
        await self._call("retire", policy)

    async def info(self) -> SamplerInfo:
        return await self._call("info")

    async def sleep(self, keep_weights: bool = False) -> None:
        """Finish running requests, then free the GPU until `wake`. New requests wait.

        With `keep_weights`, the weights stay in the GPU. Raises RequestRefused if it cannot sleep, SamplerError.
        """
        await self._call("sleep", keep_weights)

    async def wake(self) -> None:
        """Take the GPU back. Raises SamplerError, and serves nothing more, if the weights have changed meanwhile."""
        await self._call("wake")


_NOT_CANCELLED = ("publish", "retire", "sleep", "wake")
"""Calls that are not cancelled with their caller, because an engine must not stop in the middle of them."""


class LoopSampler(CalledSampler):
    """The `Sampler` protocol over an engine that runs on one event loop, in which it was opened.

    All methods are awaited there, so their shared state needs no locks. For other loops and processes, `start_sampler`
    hosts it.
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
        """Draw candidates. `params.max_tokens` fits the model. `target` belongs to the policy's version; it is None for
        the base model. Cancelling this call aborts the request."""

    @abstractmethod
    async def _load(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> Version:
        """Load weights into the engine. If it raises an error, nothing stays in the engine."""

    @abstractmethod
    async def _unload(self, version: Version) -> None:
        """Free a version that has no more requests."""

    @abstractmethod
    async def _close(self) -> None:
        """Stop the engine."""

    async def aclose(self) -> None:
        """Stop the engine; pending requests fail with SamplerError. Safe to call twice."""
        if self._closing is None:
            self._broken = SamplerError("The sampler was closed.", "Open a new one.")
            self._closing = asyncio.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _open_or_close(self, work: Coroutine[Any, Any, None]) -> Self:
        """Run `work`, which opens this sampler, and return the sampler. If `work` fails, close the sampler."""
        try:
            await self._run(work)
        except BaseException:
            await asyncio.shield(self.aclose())
            raise
        return self

    async def _call(self, method: str, *arguments: Any) -> Any:
        work: Coroutine[Any, Any, Any] = getattr(self, f"_{method}")(*arguments)
        return await self._run(work, cancelled_with_caller=method not in _NOT_CANCELLED)

    async def _run(self, work: Coroutine[Any, Any, T], *, cancelled_with_caller: bool = True) -> T:
        """Run `work` in a task. Raises SamplerError if the sampler is broken or closed."""
        task = self._start(work)
        try:
            return await (task if cancelled_with_caller else asyncio.shield(task))
        except asyncio.CancelledError:
            # Either somebody cancels the caller, or the sampler was closed, which cancels its tasks. Only the former
            # reaches the caller as a cancellation.
            caller = asyncio.current_task()
            caller_is_cancelled = caller is not None and caller.cancelling() > 0
            if task.cancelled() and not caller_is_cancelled and self._broken is not None:
                raise SamplerError(self._broken.cause, self._broken.remedy) from None
            raise

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work as a task that is cancelled when the sampler closes. Raises SamplerError if the engine is
        broken.
        """
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
            # Mark the error as retrieved: if nobody waits for the task any more, asyncio would log it.
            task.exception()

    def _fail(self, error: SamplerError) -> None:
        """Note that the engine is gone: every later request fails at once with the first error."""
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
        """Sample completions from a version, which stays loaded meanwhile. `max_tokens` is cut to the room in the
        context.
        """
        room = room_after(len(prompt), self.max_model_len)
        if n < 1 or params.max_tokens < 1:
            raise RequestRefused(
                f"n = {n} and max_tokens = {params.max_tokens} were asked for.", "Ask for at least 1 of both."
            )
        version = self._locate(policy)
        version.running += 1
        fitted = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
        # Greedy candidates are all equal, and vLLM draws only one of them.
        n_drawn = n if params.temperature > 0 else 1
        try:
            completions = await self._generate(prompt, n_drawn, fitted, policy, version.target)
            return completions * (n // n_drawn)
        finally:
            # A version that was retired meanwhile is unloaded after its last request.
            is_unused = self._versions.left(version)
            if is_unused and self._broken is None:
                self._start(self._drop(version))

    def _locate(self, policy: PolicyRef) -> Version:
        return self._versions.locate(policy)

    async def _publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> str:
        async with self._versions.lock:
            if (served_fingerprint := self._versions.known(policy, weights)) is not None:
                return served_fingerprint
            version = await self._load(policy, weights, lora)
            self._versions.add(version)
            return version.fingerprint

    async def _retire(self, policy: PolicyRef) -> None:
        version = self._versions.retire(policy)
        if not version.running:
            await self._drop(version)

    async def _drop(self, version: Version) -> None:
        """Unload a retired version from the engine, and tell publishers that wait for its slot."""
        if not self._versions.holds(version):
            return  # another version has taken its place in the engine
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
    """Most tokens that may follow a prompt of so many tokens. Raises RequestRefused for no prompt or too long a one."""
    if not 1 <= prompt < max_model_len:
        raise RequestRefused(
            f"The prompt has {prompt} tokens; the model takes 1 to {max_model_len - 1} and one to answer.",
            "Shorten the prompt, or use a model with a longer context.",
        )
    return max_model_len - prompt
