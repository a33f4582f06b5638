"""The name of a graph that starts: what its callbacks tell is the name of the run, which an application may choose."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

from cotune.context import current_episode
from cotune.integrations.versions import missing_hook

starting: ContextVar[str | None] = ContextVar("cotune_graph", default=None)
"""Name of the graph whose run is about to start; taken by the first run that does."""


def install() -> None:
    """Hook the two methods that every way to run a graph goes through."""
    from langgraph.pregel.main import Pregel

    for name in ("stream", "astream"):
        if not hasattr(Pregel, name):
            raise missing_hook("langgraph", f"Pregel.{name}")
    stream, astream = Pregel.stream, Pregel.astream

    @functools.wraps(stream)
    def named_stream(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        parts = stream(self, *args, **options)
        return parts if current_episode.get() is None else _started(self.name, parts)

    @functools.wraps(astream)
    def named_astream(self: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        parts = astream(self, *args, **options)
        return parts if current_episode.get() is None else _astarted(self.name, parts)

    Pregel.stream, Pregel.astream = named_stream, named_astream  # type: ignore[method-assign, assignment]


def _started(name: str, parts: Any) -> Iterator[Any]:
    starting.set(name)
    try:
        yield from parts
    finally:
        starting.set(None)


async def _astarted(name: str, parts: Any) -> AsyncIterator[Any]:
    starting.set(name)
    try:
        async for part in parts:
            yield part
    finally:
        starting.set(None)
        await parts.aclose()
