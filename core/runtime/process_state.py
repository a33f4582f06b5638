"""State of the whole process, and state of one event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ProcessState:
    """Base of classes with one instance at the top level of a module. docs/internals/architecture.md lists each, with
    the reason why it is global."""


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = weakref.WeakKeyDictionary()


def state_of_loop(loop: asyncio.AbstractEventLoop, name: str, make: Callable[[], T]) -> T:
    """The value of an event loop under this name. `make` creates it on first use; it is dropped with the loop."""
    state = _of_loop.setdefault(loop, {})
    if name not in state:
        state[name] = make()
    value: T = state[name]
    return value


def drop_state_of_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Drop the state of an event loop that has ended. Values that refer to their loop would keep both alive."""
    _of_loop.pop(loop, None)
