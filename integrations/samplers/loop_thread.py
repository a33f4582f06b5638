"""An event loop in a thread of its own, for what must be shared by callers from several loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cotune.errors import SamplerError

T = TypeVar("T")

log = logging.getLogger(__name__)


class LoopThread:
    """Runs coroutines for callers from any event loop. Cancelling the caller cancels the coroutine."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """The result of `function(*arguments)`, run in the thread. Raises SamplerError after `stop`."""
        with self._lock:
            if self._stopping:
                raise SamplerError("The sampler was closed.", "Open a new one.")
            future = asyncio.run_coroutine_threadsafe(function(*arguments), self._loop)
        return await asyncio.wrap_future(future)

    async def stop(self, last: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        """Run `last`, wait so many seconds for the tasks that are left, cancel them, and end the thread."""
        with self._lock:
            stopping, self._stopping = self._stopping, True
        if not stopping:
            asyncio.run_coroutine_threadsafe(self._end(last, seconds), self._loop)
        await asyncio.to_thread(self._thread.join)

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        try:
            await last()
        except Exception:
            log.exception("The last work of %s failed.", self._thread.name)
        try:
            for pause in (seconds, 1.0):
                left = asyncio.all_tasks() - {asyncio.current_task()}
                if left:
                    await asyncio.wait(left, timeout=pause)
                for task in left:
                    task.cancel()
        finally:
            self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
