"""Threads: code that an application starts in threads of its own stays in its episode and node."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cotune.context import current_episode

_installed = False


def carry_context() -> None:
    """Make `Thread.start` and `ThreadPoolExecutor.submit` copy the caller's context, inside an episode only.

    Installed once; outside an episode both do what they always did.
    """
    global _installed
    if _installed:
        return
    _installed = True
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        if current_episode.get() is not None:
            _bind(self, contextvars.copy_context())
        start(self)

    @functools.wraps(submit)  # type: ignore[arg-type]
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if current_episode.get() is None:
            return submit(self, fn, *args, **kwargs)
        context = contextvars.copy_context()
        # A pool's worker outlives the episode that happens to start it, so the worker itself must not inherit it.
        token = current_episode.set(None)
        try:
            return submit(self, context.run, fn, *args, **kwargs)
        finally:
            current_episode.reset(token)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_in_context  # type: ignore[method-assign, assignment]


def _bind(thread: threading.Thread, context: contextvars.Context) -> None:
    run = thread.run

    def run_in_context() -> None:
        del thread.__dict__["run"]
        context.run(run)

    thread.run = run_in_context  # type: ignore[method-assign]
