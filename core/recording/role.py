"""`cotune.role`: the application itself names the role of its calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import Token
from types import FrameType, TracebackType
from typing import Any, TypeVar

from cotune.errors import WorkflowError
from cotune.recording.carrying import remember_task_starters
from cotune.recording.context import RoleOverride, generator_roles, role_override

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class role:
    """Attribute every call made inside to the role `name`, whatever framework makes it.

    ```python
    with cotune.role("planner"):
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    ```

    It also decorates functions, coroutine functions and generator functions. In a generator, the role applies to the
    generator's own calls, not to calls of the code that reads from it. Raises WorkflowError for a name that is not a
    text, for anything else that is decorated, and in an asynchronous generator outside asyncio.
    """

    def __init__(self, name: str) -> None:
        """`name` is the role. Raises WorkflowError unless it is a text that is not empty."""
        if not isinstance(name, str) or not name:
            raise WorkflowError(
                f"cotune.role({name!r}): the name of a role must be a text that is not empty.",
                'For example: with cotune.role("planner"): ...',
            )
        self._name = name
        self._override: RoleOverride | None = None
        self._token: Token[RoleOverride | None] | None = None

    def __enter__(self) -> None:
        """Set the role for the block.

        In a generator the role is remembered by the generator's frame, elsewhere in a ContextVar: see
        `generator_roles`.
        """
        if self._override is not None:
            raise WorkflowError(
                f"This cotune.role({self._name!r}) is entered already.",
                f"Make one for each block: with cotune.role({self._name!r}): ...",
            )
        frame = _frame_of_block(sys._getframe(1))
        override = RoleOverride(self._name, frame, time.perf_counter_ns())
        if frame.f_code.co_flags & _GENERATOR:
            self._let_tasks_inherit(frame)
            generator_roles.setdefault(id(frame), []).append(override)
        else:
            self._token = role_override.set(override)
        self._override = override

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the role: remove it from the ContextVar or from the generator that `__enter__` gave it to. Does nothing
        if the block was not entered."""
        override = self._override
        token = self._token
        self._override = self._token = None
        if override is None:
            return
        if token is not None:
            # A framework may leave the block in another context than it was entered in. In that context the role was
            # never set, or is a copy that ends with its task.
            with contextlib.suppress(ValueError):
                role_override.reset(token)
            return
        frame_id = id(override.frame)
        roles_of_generator = generator_roles.get(frame_id, [])
        if override in roles_of_generator:
            roles_of_generator.remove(override)
        if not roles_of_generator:
            generator_roles.pop(frame_id, None)

    def __call__(self, fn: FunctionT) -> FunctionT:
        """Decorate `fn`: all its calls get this role."""
        name = self._name
        if not callable(fn) or inspect.isclass(fn):
            raise WorkflowError(
                f"@cotune.role({name!r}) cannot decorate {_function_name(fn)}: it takes functions, coroutine "
                "functions and generator functions.",
                "Decorate the methods or functions that make the calls, below @staticmethod or @classmethod.",
            )
        if inspect.iscoroutinefunction(fn):
            wrapper = _wrap_coroutine_function(fn, name)
        elif inspect.isasyncgenfunction(fn):
            wrapper = _wrap_async_generator_function(fn, name)
        elif inspect.isgeneratorfunction(fn):
            wrapper = _wrap_generator_function(fn, name)
        else:
            wrapper = _wrap_function(fn, name)
        return functools.wraps(fn)(wrapper)  # type: ignore[return-value]

    def _let_tasks_inherit(self, frame: FrameType) -> None:
        """Let the tasks that a generator starts inherit its role. `frame` is the generator's frame.

        Raises WorkflowError in an asynchronous generator whose tasks cannot inherit it.
        """
        loop = asyncio._get_running_loop()
        if loop is None:
            if frame.f_code.co_flags & inspect.CO_GENERATOR:
                return  # a plain generator outside asyncio starts no tasks
            kind = "a library other than asyncio"
        else:
            try:
                loop_class: Any = type(loop)
                remember_task_starters(loop_class)
                return
            except TypeError:  # a class of event loops in C, whose methods cannot be replaced
                kind = f"an event loop of type {type(loop).__name__}"
        raise WorkflowError(
            f"cotune.role({self._name!r}) cannot be entered in an asynchronous generator under {kind}: tasks that the "
            "generator starts would lose the role.",
            "Enter it in the coroutines that the generator awaits.",
        )


def _wrap_coroutine_function(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A coroutine function that awaits `fn` inside the role `name`."""

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with role(name):
            return await fn(*args, **kwargs)

    return wrapper


def _wrap_generator_function(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A generator function that runs `fn` inside the role `name`, from its first to its last step."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with role(name):
            return (yield from fn(*args, **kwargs))

    return wrapper


def _wrap_async_generator_function(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """An asynchronous generator function that runs `fn` inside the role `name`, from its first to its last step."""

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with role(name):
            generator = fn(*args, **kwargs)
            # Asynchronous generators have no `yield from`. So this loop passes to `fn` what its consumer sends: values,
            # errors, and the end.
            step = generator.asend(None)
            while True:
                try:
                    value = await step
                except StopAsyncIteration:
                    return
                try:
                    sent = yield value
                except GeneratorExit:
                    await generator.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001, the generator decides about it
                    step = generator.athrow(error)
                else:
                    step = generator.asend(sent)

    return wrapper


def _wrap_function(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that calls `fn` inside the role `name`.

    It raises WorkflowError if the work of `fn` would only begin after the role has ended.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with role(name):
            result = fn(*args, **kwargs)
        # Another decorator hides an async function or a generator: its calls come after the block, without the role.
        if inspect.iscoroutine(result) or isinstance(result, Generator | AsyncGenerator):
            if not isinstance(result, AsyncGenerator):
                # Closed unstarted, so that Python does not warn of a coroutine that was never awaited.
                result.close()
            raise WorkflowError(
                f"{_function_name(fn)} returns a {type(result).__name__}, whose calls would be made after "
                f"@cotune.role({name!r}) has ended.",
                "Put @cotune.role below the other decorators, next to the async function or the generator.",
            )
        return result

    return wrapper


def _frame_of_block(frame: FrameType) -> FrameType:
    """The frame of the code whose `with` block has the role, from the frame that calls `role.__enter__`.

    That may be contextlib (an ExitStack), or a `@contextmanager` function that enters the role for its caller. Then the
    block is in an outer frame.
    """
    while frame.f_back is not None:
        caller = frame.f_back
        is_in_contextlib = frame.f_globals.get("__name__") == "contextlib"
        is_generator = bool(frame.f_code.co_flags & _GENERATOR)
        is_context_manager = is_generator and caller.f_globals.get("__name__") == "contextlib"
        if not is_in_contextlib and not is_context_manager:
            break
        frame = caller
    return frame


def _function_name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", None) or f"a {type(fn).__name__}")
