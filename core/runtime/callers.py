"""The functions of the application around a point: on the stack, and around the start of its task or thread."""

from __future__ import annotations

import functools
import os
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

Function = tuple[str, str]
"""Qualified name and module of a function."""

_OUTSIDE = "cotune.episodes.run_sync"
"""The module that runs the event loop of episodes. Functions further out on the stack do not belong to an episode."""
_LOOP = "asyncio.events"
_NAMELESS = frozenset(("<module>", "<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))
_LIBRARIES = ("site-packages", "dist-packages", str(Path(os.__file__).parent))
started_by: ContextVar[tuple[Function, ...] | None] = ContextVar("cotune_started_by", default=None)
"""The functions around the point at which this task or thread was started."""


def functions_around(frame: FrameType | None) -> tuple[Function, ...]:
    """The application's functions around `frame`, innermost first, each once: the ones on its stack, then the ones that
    started its task or thread (`started_by`)."""
    starters = started_by.get()
    functions: list[Function] = []
    while frame is not None:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__"))
        # In a task, the functions outside the event loop only run the loop: the starters are known instead.
        is_outside_task = module == _LOOP and starters is not None
        if module == _OUTSIDE or is_outside_task:
            break
        if code.co_name not in _NAMELESS and _is_own(code.co_filename, module):
            functions.append((code.co_qualname, module))
        frame = frame.f_back
    if starters is not None:
        functions.extend(starters)
    return tuple(dict.fromkeys(functions))


@functools.lru_cache(4096)
def _is_own(file: str, module: str) -> bool:
    """Whether code belongs to the application: typed at a prompt or in a file, outside libraries and cotune."""
    if module.partition(".")[0] == "cotune":
        return False
    if file.startswith("<"):
        return module == "__main__"
    return not any(library in file for library in _LIBRARIES)
