"""Threads, pools and tasks that an application starts stay in its episode, its node and its role."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from cotune.recording.context import current_episode, generator_roles, role_here, role_override
from cotune.runtime.callers import functions_around, started_by


def carry_context(*, remember_starters: bool = False) -> None:
    """Let threads and jobs of thread pools run in a copy of the context of the code that starts them, inside an episode
    only.

    Covers `Thread.start` (timers too), `ThreadPoolExecutor.submit` (so `map` and `run_in_executor`) and
    `multiprocessing.pool.ThreadPool`, including existing pools. With `remember_starters`, asyncio's tasks also
    remember the functions that started them, for episodes whose roles are named by a function (`LiveEpisode.roles`).
    The patches stay for the process, but check for an episode at each start: outside of one nothing changes.
    """
    _carry_into_threads()
    if remember_starters:
        remember_task_starters(asyncio.BaseEventLoop)


_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
_QUEUE_METHODS = ("apply_async", "_map_async", "imap", "imap_unordered")
"""The methods through which all jobs enter a `multiprocessing.pool.ThreadPool`: its other methods call these."""


@functools.cache
def _carry_into_threads() -> None:
    """Patch threads and thread pools of the standard library. Once per process, by the cache."""
    from multiprocessing.pool import ThreadPool

    start = threading.Thread.start
    submit = ThreadPoolExecutor.submit

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        """Start a thread. If its starter is in an episode, the thread runs in a copy of the starter's context."""
        # A pool's worker outlives the episode that happens to start it, so the worker itself must not inherit it.
        target = getattr(self, "_target", None)
        is_worker_of_pool = getattr(target, "__module__", None) in _POOLS
        if current_episode.get() is not None and not is_worker_of_pool:
            context = _with_callers(contextvars.copy_context())
            run = self.run

            def run_in_context() -> None:
                del self.__dict__["run"]  # from here on, the thread has its own `run` again
                context.run(run)

            self.run = run_in_context  # type: ignore[method-assign]
        start(self)

    @functools.wraps(submit)  # type: ignore[arg-type]
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Submit a job to a pool. If the submitting code is in an episode, the job runs in a copy of its context."""
        if current_episode.get() is None:
            return submit(self, fn, *args, **kwargs)
        # asyncio and LangChain submit `context.run` themselves, so a second context around it would have no effect.
        method = fn.func if type(fn) is functools.partial else fn
        context = getattr(method, "__self__", None)
        if type(context) is contextvars.Context:
            _with_callers(context)
            return submit(self, fn, *args, **kwargs)
        return submit(self, _with_callers(contextvars.copy_context()).run, fn, *args, **kwargs)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_in_context  # type: ignore[method-assign, assignment]
    for name in _QUEUE_METHODS:
        setattr(ThreadPool, name, _queued_in_context(getattr(ThreadPool, name)))


@functools.cache
def remember_task_starters(loop_class: Any) -> None:
    """Patch `create_task` of a class of event loops, so that its tasks remember which functions and which generator
    started them. Raises TypeError if the class cannot be patched.

    asyncio gives each task a copy of the context, but the functions and the role of a generator are only on the stack
    of the code that starts the task: `_with_callers` adds them to the copy.
    """
    owner: Any = next(cls for cls in loop_class.__mro__ if "create_task" in vars(cls))
    if owner is not loop_class:  # patch the class that has the method, once for all of its subclasses
        remember_task_starters(owner)
        return
    create: Callable[..., Any] = owner.create_task

    @functools.wraps(create)
    def create_task(self: Any, coro: Any, *, context: contextvars.Context | None = None, **options: Any) -> Any:
        episode = current_episode.get()
        has_roles_function = episode is not None and episode.roles is not None
        may_have_generator_role = episode is not None and bool(generator_roles)
        if has_roles_function or may_have_generator_role:
            if context is None:
                context = contextvars.copy_context()
            context = _with_callers(context)
        return create(self, coro, context=context, **options)

    owner.create_task = create_task


def _with_callers(context: contextvars.Context) -> contextvars.Context:
    """Add facts about the starter of a task or thread to the `context` of the task or thread.

    These are the functions that start it, which a roles function may read, and the role of a generator that starts it.
    Only the stack of the starter has them.
    """
    episode = current_episode.get()
    caller = sys._getframe(1)
    with suppress(RuntimeError):  # raised for a context that is already entered
        if episode is not None and episode.roles is not None:
            context.run(started_by.set, functions_around(caller))
        if generator_roles:
            context.run(role_override.set, role_here(caller))
    return context


def _queued_in_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `multiprocessing.pool.ThreadPool` whose jobs run in the context of the code that queues them."""

    @functools.wraps(original)
    def queue(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Queue a job for another thread. If the queuing code is in an episode, the job runs in a copy of its context,
        which holds the episode and the role.
        """
        if current_episode.get() is None:
            return original(self, func, *args, **kwargs)
        context = _with_callers(contextvars.copy_context())

        # Without `updated`: `func` may be any callable, and an object's attributes must not be copied to the function.
        @functools.wraps(func, updated=())
        def in_context(*job_args: Any, **job_kwargs: Any) -> Any:
            return context.copy().run(func, *job_args, **job_kwargs)  # several workers may run it at the same time

        return original(self, in_context, *args, **kwargs)

    return queue
