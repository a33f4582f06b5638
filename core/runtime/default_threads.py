"""The default threads of an event loop: as many as the application needs at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from cotune.runtime.process_state import state_of_loop

_THREADS = 1024


class _Threads(ThreadPoolExecutor):
    """A loop's default threads. The end of the loop does not wait for code in them, which may never end."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def grow_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop a default pool that grows on demand, unless the application has set one.

    Frameworks run an application's sync nodes there, and other code while they wait: asyncio's own default (a few
    threads per core) would lock up.
    """
    state_of_loop(loop, "default threads", lambda: _grow(loop))


def _grow(loop: asyncio.AbstractEventLoop) -> None:
    """Replace the default pool of a loop, unless it is the application's."""
    default = getattr(loop, "_default_executor", None)
    if default is None or getattr(default, "_thread_name_prefix", "") == "asyncio":
        loop.set_default_executor(_Threads(_THREADS, thread_name_prefix="cotune"))
        if default is not None:
            default.shutdown(wait=False)
