"""The default threads of an event loop: as many as the application needs at once."""

from __future__ import annotations

import asyncio
import weakref
from concurrent.futures import ThreadPoolExecutor

_THREADS = 1024
_grown: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


class _Threads(ThreadPoolExecutor):
    """A loop's default threads. The loop's end does not wait for code in them that may never end."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def grow_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop a default pool that grows on demand, where the application has set none of its own.

    Frameworks run an application's sync nodes there, and other code while they wait: asyncio's own default (a few
    threads per core) would lock up.
    """
    if loop in _grown:
        return
    _grown.add(loop)
    default = getattr(loop, "_default_executor", None)
    if default is None or getattr(default, "_thread_name_prefix", "") == "asyncio":
        loop.set_default_executor(_Threads(_THREADS, thread_name_prefix="cotune"))
        if default is not None:
            default.shutdown(wait=False)
