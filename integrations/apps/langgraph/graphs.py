"""The graph that starts: what its callbacks tell is the name of the run, which an application may choose."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

from cotune.integrations.apps.langgraph import threads
from cotune.integrations.apps.langgraph.threads import own_thread, watch_thread
from cotune.integrations.versions import missing_hook
from cotune.recording.context import current_episode

starting: ContextVar[Any] = ContextVar("cotune_graph", default=None)
"""The graph whose run is about to start; taken by the first run that does."""


def install() -> None:
    """Hook the two methods that every way to run a graph goes through."""
    from langgraph.pregel.main import Pregel

    for name in ("stream", "astream"):
        if not hasattr(Pregel, name):
            raise missing_hook("langgraph", f"Pregel.{name}")
    stream, astream = Pregel.stream, Pregel.astream

    @functools.wraps(stream)
    def named_stream(self: Any, input: Any, config: Any = None, **options: Any) -> Iterator[Any]:
        config = own_thread(self, config)
        watch_thread(self, config)
        parts = stream(self, input, config, **options)
        return parts if current_episode.get() is None else _started(self, parts)

    @functools.wraps(astream)
    def named_astream(self: Any, input: Any, config: Any = None, **options: Any) -> AsyncIterator[Any]:
        config = own_thread(self, config)
        watch_thread(self, config)
        parts = astream(self, input, config, **options)
        return parts if current_episode.get() is None else _Astarted(self, parts)

    Pregel.stream, Pregel.astream = named_stream, named_astream
    threads.install(Pregel)


def _started(graph: Any, parts: Any) -> Iterator[Any]:
    starting.set(graph)
    try:
        yield from parts
    finally:
        starting.set(None)


class _Astarted(AsyncGenerator[Any, Any]):
    """An object and no generator, as another generator around every part costs more than the rest of the hook."""

    def __init__(self, graph: Any, parts: Any) -> None:
        self._graph: Any = graph
        self._parts = parts

    def __anext__(self) -> Any:
        return self._parts.__anext__() if self._graph is None else self._first()

    async def _first(self) -> Any:
        graph, self._graph = self._graph, None
        starting.set(graph)
        try:
            return await self._parts.__anext__()
        finally:
            starting.set(None)

    def asend(self, value: Any) -> Any:
        return self.__anext__() if value is None else self._parts.asend(value)

    def athrow(self, *raised: Any) -> Any:
        return self._parts.athrow(*raised)

    def aclose(self) -> Any:
        return self._parts.aclose()
