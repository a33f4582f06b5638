"""Streams of a framework, driven so that what is set for its code is not set in the application's between the steps."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any


async def step_inside(
    context: Callable[[], AbstractContextManager[None]],
    source: AsyncIterator[Any],
    seen: Callable[[Any], None] = lambda item: None,
) -> AsyncGenerator[Any, None]:
    """The items of `source`, each step of which runs inside a new `context()`; `seen` gets each item first."""
    try:
        while True:
            with context():
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            seen(item)
            yield item
    finally:
        if hasattr(source, "aclose"):
            with context():
                await source.aclose()
