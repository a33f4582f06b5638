"""Threads and tasks: code that an application starts in threads of its own stays in its episode and node, and the
functions that started a thread or task are known in it where roles are named by them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cotune.recording.context import current_episode
from cotune.runtime.callers import functions_around, started_by

_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
_QUEUED = ("apply_async", "_map_async", "imap", "imap_unordered")
"""By these methods everything gets into a `multiprocessing.pool.ThreadPool`: the others call them."""
_installed = False


def carry_context() -> None:
    """Make threads and what is submitted to thread pools run in a copy of the caller's context, inside an episode only.

    Covers `Thread.start` (timers too), `ThreadPoolExecutor.submit` (so `map` and `run_in_executor`) and
    `multiprocessing.pool.ThreadPool`, also of pools made before. Where a function names roles, asyncio's tasks too know
    who started them. Installed once; outside an episode all of them do what they always did.
    """
    global _installed
    if _installed:
        return
    _installed = True
    from multiprocessing.pool import ThreadPool

    start, submit = threading.Thread.start, ThreadPoolExecutor.submit
    create: Callable[..., Any] = asyncio.BaseEventLoop.create_task

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        # A pool's worker outlives the episode that happens to start it, so the worker itself must not inherit it.
        if current_episode.get() is not None and not _is_pool_worker(self):
            context = contextvars.copy_context()
            _pass_on_callers(context)
            _bind(self, context)
        start(self)

    @functools.wraps(submit)  # type: ignore[arg-type]
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if current_episode.get() is None:
            return submit(self, fn, *args, **kwargs)
        inner = fn.func if type(fn) is functools.partial else fn
        given = getattr(inner, "__self__", None)
        if type(given) is contextvars.Context:  # as asyncio and LangChain submit
            _pass_on_callers(given)
            return submit(self, fn, *args, **kwargs)
        context = contextvars.copy_context()
        _pass_on_callers(context)
        return submit(self, context.run, fn, *args, **kwargs)

    @functools.wraps(create)
    def create_task_in_context(
        self: Any, coro: Any, *, context: contextvars.Context | None = None, **options: Any
    ) -> Any:
        episode = current_episode.get()
        if episode is not None and episode.roles is not None:
            context = contextvars.copy_context() if context is None else context
            _pass_on_callers(context)
        return create(self, coro, context=context, **options)

    asyncio.BaseEventLoop.create_task = create_task_in_context  # type: ignore[method-assign]
    threading.Thread.start = start_in_context  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_in_context  # type: ignore[method-assign, assignment]
    for name in _QUEUED:
        setattr(ThreadPool, name, _queued_in_context(getattr(ThreadPool, name)))


def _pass_on_callers(context: contextvars.Context) -> None:
    """Keep in `context`, in which a task or thread will run, the functions around this point, where roles need them."""
    episode = current_episode.get()
    if episode is not None and episode.roles is not None:
        around = functions_around(sys._getframe(1))
        with contextlib.suppress(RuntimeError):  # entered already
            context.run(started_by.set, around)


def _queued_in_context(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def queue(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None:
            return original(self, func, *args, **kwargs)
        context = contextvars.copy_context()
        _pass_on_callers(context)

        @functools.wraps(func, updated=())
        def in_context(*given: Any, **named: Any) -> Any:
            return context.copy().run(func, *given, **named)  # a copy each: several workers may run it at once

        return original(self, in_context, *args, **kwargs)

    return queue


def _is_pool_worker(thread: threading.Thread) -> bool:
    return getattr(getattr(thread, "_target", None), "__module__", None) in _POOLS


def _bind(thread: threading.Thread, context: contextvars.Context) -> None:
    run = thread.run

    def run_in_context() -> None:
        del thread.__dict__["run"]
        context.run(run)

    thread.run = run_in_context  # type: ignore[method-assign]
