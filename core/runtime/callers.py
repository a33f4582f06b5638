"""The functions of the application around a point: those on the stack, and those that started its task or thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import sys
from collections.abc import Callable
from contextvars import Context, ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from cotune.context import current_episode

Function = tuple[str, str]
"""Qualified name and module of a function."""

_OUTSIDE = "cotune.runtime.run_sync"
"""What runs the event loop of episodes: whoever called it makes no call in them."""
_LOOP = "asyncio.events"
_NAMELESS = frozenset(("<module>", "<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))
_LIBRARIES = ("site-packages", "dist-packages", str(Path(os.__file__).parent))
_started_by: ContextVar[tuple[Function, ...] | None] = ContextVar("cotune_started_by", default=None)


def functions_around(frame: FrameType | None) -> tuple[Function, ...]:
    """The application's functions that are running at `frame`, innermost first, each once."""
    started = _started_by.get()
    found: list[Function] = []
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if module == _OUTSIDE or (module == _LOOP and started is not None):
            break
        if code.co_name not in _NAMELESS and _is_own(code.co_filename, module):
            found.append((code.co_qualname, module))
        frame = frame.f_back
    return tuple(dict.fromkeys((*found, *(started or ()))))


def hand_on(context: Context) -> None:
    """Tell what will run in `context`, in another task or thread, which functions started it, where roles need it."""
    if getattr(current_episode.get(), "roles", None) is not None:
        around = functions_around(sys._getframe(1))
        with contextlib.suppress(RuntimeError):  # entered already
            context.run(_started_by.set, around)


@functools.cache
def follow_tasks() -> None:
    """From now on asyncio's event loops hand on to their tasks which functions started them."""
    create: Callable[..., Any] = asyncio.BaseEventLoop.create_task

    @functools.wraps(create)
    def create_task(self: Any, coro: Any, *, context: Context | None = None, **options: Any) -> Any:
        if current_episode.get() is None:
            return create(self, coro, context=context, **options)
        inside = contextvars.copy_context() if context is None else context
        hand_on(inside)
        return create(self, coro, context=inside, **options)

    asyncio.BaseEventLoop.create_task = create_task  # type: ignore[method-assign]


@functools.lru_cache(4096)
def _is_own(file: str, module: str) -> bool:
    """Whether code is the application's: what is typed in or written in a file, outside libraries and cotune."""
    if module.partition(".")[0] == "cotune":
        return False
    if file.startswith("<"):
        return module == "__main__"
    return not any(library in file for library in _LIBRARIES)
