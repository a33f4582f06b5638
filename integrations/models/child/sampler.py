"""The `Sampler` protocol over an engine in a child process or a thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self

from cotune.errors import SamplerError
from cotune.integrations.models.child.process import Fail, Receive
from cotune.integrations.models.child.wire import Answer, Command
from cotune.integrations.models.engine_sampler import CalledSampler


class EngineHost(Protocol):
    """The child process or thread of an engine. `send` never blocks; the other methods do."""

    def start(self, source: Any) -> None: ...

    def send(self, command: Command) -> None: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


class HostedSampler(CalledSampler):
    """A sampler whose engine takes commands from every event loop and thread of this process."""

    def __init__(self, host: Callable[[Receive, Fail], EngineHost]) -> None:
        self._host: Any = host(self._receive, self._fail)
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._broken: SamplerError | None = None

    async def start(self, source: Any) -> Self:
        """Start the engine from `source`, and wait until it serves. If it is cancelled, the process is killed."""
        try:
            await asyncio.to_thread(self._start, source)
        except asyncio.CancelledError:
            self._fail(_closed())
            self._host.kill()
            raise
        return self

    async def aclose(self) -> None:
        """Stop the engine; pending requests fail with SamplerError. Safe to call twice."""
        self._fail(_closed())
        await asyncio.to_thread(self._host.close)

    @property
    def broken(self) -> SamplerError | None:
        """The reason why the engine no longer answers; None while it answers."""
        return self._broken

    def _start(self, source: Any) -> None:
        self._host.start(source)
        if self._broken is not None:  # `start` was cancelled
            self._host.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the other process and wait for its answer. A cancelled `sample` is cancelled there too."""
        id = next(self._ids)
        answer: Future[Any] = Future()
        with self._lock:
            if self._broken is not None:
                raise SamplerError(self._broken.cause, self._broken.remedy)
            self._pending[id] = answer
        self._host.send(Command(method, id, arguments))
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with self._lock:
                unanswered = self._pending.pop(id, None)
            if unanswered is not None and method == "sample":
                self._host.send(Command("cancel", id))
            raise

    def _receive(self, replies: Sequence[Answer]) -> None:
        """Give replies to the calls that wait for them. Replies to cancelled calls are dropped."""
        with self._lock:
            answers = [self._pending.pop(reply.id, None) for reply in replies]
        for reply, answer in zip(replies, answers, strict=True):
            if answer is None or not answer.set_running_or_notify_cancel():
                continue
            if reply.error is not None:
                answer.set_exception(reply.error)
            else:
                answer.set_result(reply.value)

    def _fail(self, error: SamplerError) -> None:
        """Answer all pending and all later requests with `error`, as the engine has ended. Only the first error
        counts."""
        with self._lock:
            if self._broken is None:
                self._broken = error
            pending = list(self._pending.values())
            self._pending.clear()
        for answer in pending:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(SamplerError(error.cause, error.remedy))


def _closed() -> SamplerError:
    return SamplerError("The sampler was closed.", "Open a new one.")
