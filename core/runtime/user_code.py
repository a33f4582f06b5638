"""Running the application's code: whatever it raises fails its episode, not the run."""

from __future__ import annotations

import asyncio
import linecache
import os
import sys
import traceback
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import TypeVar

from cotune.errors import error_text
from cotune.runtime.context_vars import setting
from cotune.runtime.forks import end_child

T = TypeVar("T")

_STANDARD = str(Path(os.__file__).parent)

user_code: ContextVar[str] = ContextVar("cotune_user_code", default="")
"""A phrase for the code that runs here ("The workflow 'solve' on task 't1'"); empty for cotune's own."""


class Stopped(Exception):
    """The application's code raised what would end the whole process: SystemExit, GeneratorExit, a BaseException."""


def running(what: str) -> AbstractContextManager[None]:
    """Whatever runs inside is the application's code, called `what`."""
    return setting(user_code, what)


async def contained(work: Awaitable[T]) -> T:
    """Await the application's code. Raises Stopped for a BaseException other than Ctrl-C and a cancellation of the task
    that runs it: one that comes out of what it waits for is an error of its own.

    A child process that it has forked ends here.
    """
    process = os.getpid()
    try:
        return await work
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if _ending(error):
            raise
        raise Stopped(phrase(error)) from error
    finally:
        if os.getpid() != process:
            raised = sys.exc_info()[1]
            end_child(raised.__cause__ if isinstance(raised, Stopped) else raised)


def place(frame: FrameType | None) -> str:
    """Where a thread is: file, line, function and source of the innermost frame of the application, if any."""
    inner = frame
    while frame is not None and is_library(frame):
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return "an unknown place"
    file, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, line).strip()
    return f"{file}:{line} in {frame.f_code.co_name}" + (f": {source}" if source else "")


def is_library(frame: FrameType) -> bool:
    """Whether the code that runs there is no code of the application."""
    return is_library_file(frame.f_code.co_filename) or str(frame.f_globals.get("__name__")).startswith("cotune.")


def is_library_file(file: str) -> bool:
    """Whether a source file belongs to what is installed."""
    return file.startswith((sys.prefix, sys.base_prefix, "<")) or "/site-packages/" in file.replace(os.sep, "/")


def is_standard(frame: FrameType) -> bool:
    """Whether the code that runs there is of Python's own library."""
    file = frame.f_code.co_filename
    return file.startswith((_STANDARD, "<frozen ")) and "site-packages" not in file


def origin(error: BaseException) -> str:
    """The line of the application that an error was raised at or came through, in parentheses; that of a library where
    there is none, and empty where nothing is known."""
    while isinstance(error, Stopped) and error.__cause__ is not None:
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return ""
    frame, line = next((found for found in reversed(frames) if not is_library(found[0])), frames[-1])
    return f" ({frame.f_code.co_filename}:{line} in {frame.f_code.co_name})"


def phrase(error: BaseException) -> str:
    """Kind and text of what the application's code raised, with a text of its own where there would be none."""
    if isinstance(error, SystemExit):
        return f"SystemExit: sys.exit({error.code!r}) was called"
    if isinstance(error, asyncio.CancelledError) and not str(error):
        return f"{type(error).__name__}: something in it was cancelled"
    return error_text(error)


def _ending(error: BaseException) -> bool:
    """Whether a coroutine is ended from outside: cancelled, or closed by the garbage collector or a loop that ends."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit) and task is None
