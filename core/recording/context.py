"""The recording context: the only global state of cotune. Which episode runs here, and who is calling.

Code that an application starts in threads of its own stays in its episode and node.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.runtime.callers import functions_around, started_by
from cotune.runtime.user_code import setting

ScopeT = TypeVar("ScopeT", bound="Scope")

current_episode: ContextVar[LiveEpisode | None] = ContextVar("cotune_episode", default=None)
current_caller: ContextVar[CallerContext | None] = ContextVar("cotune_caller", default=None)
opened_call: ContextVar[LiveCall | None] = ContextVar("cotune_call", default=None)
"""A call that a model class has opened; the wire request it makes, if any, belongs to that call."""
judging: ContextVar[LiveEpisode | None] = ContextVar("cotune_judging", default=None)
"""Episode of the calls that a judge of whole episodes makes, where it is a role of the run."""
_override: ContextVar[str | None] = ContextVar("cotune_role", default=None)

current_scope: ContextVar[Scope | None] = ContextVar("cotune_scope", default=None)
scope_finders: list[Callable[[], CallerContext | None]] = []
"""How integrations find a scope that is not entered by `entered`, for example the node of a graph."""


@dataclass(eq=False, slots=True)
class Scope:
    """An agent, a team, a task or a tool at work: it makes the calls within it that no framework announces.

    Integrations subclass it.
    """

    around: Scope | None = field(default_factory=current_scope.get, init=False)
    """The scope that was current when this one was made, of whatever framework."""
    found: Hashable = field(default_factory=lambda: getattr(_found_scope(), "scope_id", None), init=False)
    """Id of the scope that was found then."""

    def caller(self) -> CallerContext:
        """Who makes a call that is made in this scope."""
        raise NotImplementedError


def innermost(kind: type[ScopeT]) -> ScopeT | None:
    """The innermost scope of one kind around this point."""
    scope = current_scope.get()
    while scope is not None and not isinstance(scope, kind):
        scope = scope.around
    return scope


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Calls made inside are made in `scope`, and are no part of a call around it."""
    with setting(current_scope, scope), called_by(None):
        yield


@contextmanager
def called_by(caller: CallerContext | None) -> Iterator[None]:
    """Calls made inside are `caller`'s, or without one the enclosing scope's; none is part of a call around it."""
    with setting(current_caller, caller), setting(opened_call, None):
        yield


@contextmanager
def role(name: str) -> Iterator[None]:
    """Attribute every call made inside to the role `name`, whatever framework makes it.

    ```python
    with cotune.role("planner"):
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    ```
    """
    with setting(_override, name):
        yield


def recording(episode: LiveEpisode) -> AbstractContextManager[None]:
    """Calls made inside belong to `episode`."""
    return setting(current_episode, episode)


def identify() -> CallerContext:
    """Explicit override first, then the newest caller that is not done, then the enclosing scope, then `app`."""
    caller = current_caller.get()
    if caller is None or caller.done:
        caller = _enclosing() or CallerContext("app", "openai")
    name = _override.get()
    if name is None:
        return caller
    caller.calls += 1
    return CallerContext(
        name,
        "override",
        state=caller.state,
        read=caller.read,
        output=caller.output,
        given=True,
        thread=caller.thread,
    )


def _enclosing() -> CallerContext | None:
    """The inner one of the current scope and the scope that is found: one that was found already when the current scope
    was made is around it. A fault of an integration costs the call its role, never the application the call."""
    found, scope = _found_scope(), current_scope.get()
    if scope is None or (found is not None and found.scope_id != scope.found):
        return found
    try:
        return scope.caller()
    except Exception as error:  # noqa: BLE001
        _count_unidentified(error)
        return None


def _found_scope() -> CallerContext | None:
    try:
        return next((found for find in scope_finders if (found := find()) is not None), None)
    except Exception as error:  # noqa: BLE001
        _count_unidentified(error)
        return None


def _count_unidentified(error: Exception) -> None:
    episode = current_episode.get()
    if episode is not None:
        episode.warn("unidentified_call", "The role of a call could not be found, it is recorded as app.", error)


def carry_context(*, callers: bool = False) -> None:
    """Make threads and jobs of thread pools run in a copy of the caller's context, inside an episode only.

    Covers `Thread.start` (timers too), `ThreadPoolExecutor.submit` (so `map` and `run_in_executor`) and
    `multiprocessing.pool.ThreadPool`, also of pools made before. With `callers`, for an episode whose roles a function
    names, tasks of asyncio know who started them. Outside an episode nothing changes.
    """
    _carry_into_threads()
    if callers:
        _tell_tasks()


_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
_QUEUED = ("apply_async", "_map_async", "imap", "imap_unordered")
"""By these methods everything gets into a `multiprocessing.pool.ThreadPool`: the others call them."""


@functools.cache
def _carry_into_threads() -> None:
    from multiprocessing.pool import ThreadPool

    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        # A pool's worker outlives the episode that happens to start it, so the worker itself must not inherit it.
        in_pool = getattr(getattr(self, "_target", None), "__module__", None) in _POOLS
        if current_episode.get() is not None and not in_pool:
            context, run = _told(contextvars.copy_context()), self.run

            def run_in_context() -> None:
                del self.__dict__["run"]
                context.run(run)

            self.run = run_in_context  # type: ignore[method-assign]
        start(self)

    @functools.wraps(submit)  # type: ignore[arg-type]
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if current_episode.get() is None:
            return submit(self, fn, *args, **kwargs)
        inner = fn.func if type(fn) is functools.partial else fn
        context = getattr(inner, "__self__", None)
        if type(context) is contextvars.Context:  # as asyncio and LangChain submit
            _told(context)
            return submit(self, fn, *args, **kwargs)
        return submit(self, _told(contextvars.copy_context()).run, fn, *args, **kwargs)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_in_context  # type: ignore[method-assign, assignment]
    for name in _QUEUED:
        setattr(ThreadPool, name, _queued_in_context(getattr(ThreadPool, name)))


@functools.cache
def _tell_tasks() -> None:
    create: Callable[..., Any] = asyncio.BaseEventLoop.create_task

    @functools.wraps(create)
    def create_task(self: Any, coro: Any, *, context: contextvars.Context | None = None, **options: Any) -> Any:
        episode = current_episode.get()
        if episode is not None and episode.roles is not None:
            context = _told(contextvars.copy_context() if context is None else context)
        return create(self, coro, context=context, **options)

    asyncio.BaseEventLoop.create_task = create_task  # type: ignore[method-assign]


def _told(context: contextvars.Context) -> contextvars.Context:
    """`context`, in which a task or thread will run, with the functions around this point, where roles need them."""
    episode = current_episode.get()
    if episode is not None and episode.roles is not None:
        around = functions_around(sys._getframe(1))
        with suppress(RuntimeError):  # entered already
            context.run(started_by.set, around)
    return context


def _queued_in_context(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def queue(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None:
            return original(self, func, *args, **kwargs)
        context = _told(contextvars.copy_context())

        @functools.wraps(func, updated=())
        def in_context(*given: Any, **named: Any) -> Any:
            return context.copy().run(func, *given, **named)  # a copy each: several workers may run it at once

        return original(self, in_context, *args, **kwargs)

    return queue
