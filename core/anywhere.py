"""Runs a coroutine to its end from plain code, also where an event loop is already running (a notebook)."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`; in a thread of its own, with the caller's context, when this one has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, work).result()
