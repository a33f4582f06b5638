"""Finds the graph of a run that starts, and its thread. Callbacks report only a name, which an application may choose.

Each branch of a replay gets a thread of its own in the checkpointer. Episodes that share a thread cause a warning.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

from cotune.integrations.apps.langchain.hooks import around
from cotune.integrations.apps.shared_objects import was_used_by_another
from cotune.integrations.versions import require_hooks
from cotune.recording.context import current_episode
from cotune.replay.responder import ReplayResponder

_THREAD_METHODS = (
    "get_state", "aget_state", "get_state_history", "aget_state_history", "update_state", "aupdate_state",
    "bulk_update_state", "abulk_update_state",
)  # fmt: skip
"""Methods of a graph that take the configuration of a thread first."""


def install() -> None:
    """Hook the two methods that all others use to run a graph, and the methods that read or change a thread.

    A thread is LangGraph's stored conversation of a graph.
    """
    from langgraph.pregel.main import Pregel

    require_hooks("langgraph", Pregel, "stream", "astream")
    stream = Pregel.stream
    astream = Pregel.astream

    @functools.wraps(stream)
    def named_stream(self: Any, input: Any, config: Any = None, **options: Any) -> Iterator[Any]:
        thread_config = _branch_config(self, config)
        _warn_of_shared_thread(self, thread_config)
        output = stream(self, input, thread_config, **options)
        if current_episode.get() is None:
            return output
        return _announce_run(self, output)

    @functools.wraps(astream)
    def named_astream(self: Any, input: Any, config: Any = None, **options: Any) -> AsyncIterator[Any]:
        thread_config = _branch_config(self, config)
        _warn_of_shared_thread(self, thread_config)
        output = astream(self, input, thread_config, **options)
        if current_episode.get() is None:
            return output
        return _AnnouncedRun(self, output)

    Pregel.stream = named_stream
    Pregel.astream = named_astream
    for name in _THREAD_METHODS:
        original = getattr(Pregel, name, None)
        if original is not None:
            setattr(Pregel, name, _in_branch_thread(original))


def expect_run(graph: Any) -> None:
    """Note that the next run that starts here belongs to this graph; None for an unknown graph."""
    around.set(around.get()._replace(starting_graph=graph))


def _announce_run(graph: Any, parts: Any) -> Iterator[Any]:
    """Yield the parts of a graph's output. The run that starts with the first one is noted as the graph's."""
    expect_run(graph)
    try:
        yield from parts
    finally:
        expect_run(None)


class _AnnouncedRun(AsyncGenerator[Any, Any]):
    """The parts of a graph's output. The run that starts with the first one is noted as the graph's.

    A generator around every part would cost more than the rest of the hook.
    """

    def __init__(self, graph: Any, parts: Any) -> None:
        self._graph: Any = graph
        self._parts = parts

    def __anext__(self) -> Any:
        return self._parts.__anext__() if self._graph is None else self._first()

    async def _first(self) -> Any:
        """The first part of the stream. The graph's run begins with it, so the graph is registered now."""
        graph = self._graph
        self._graph = None
        expect_run(graph)
        try:
            return await self._parts.__anext__()
        finally:
            expect_run(None)

    def asend(self, value: Any) -> Any:
        return self.__anext__() if value is None else self._parts.asend(value)

    def athrow(self, *raised: Any) -> Any:
        return self._parts.athrow(*raised)

    def aclose(self) -> Any:
        return self._parts.aclose()


def _branch_config(graph: Any, config: Any) -> Any:
    """`config` for this branch of a replay. A thread of the recorded episode is replaced by a new one, because the
    application may use the same thread id in the branch."""
    live = current_episode.get()
    if live is None or not isinstance(live.responder, ReplayResponder) or _is_nested():
        return config
    thread = _thread_id(graph, config)
    if str(thread) not in live.responder.replay.script.threads:
        return config
    branch_config = dict(config or {})
    branch_config["configurable"] = {**(branch_config.get("configurable") or {}), "thread_id": f"{thread}@{live.id}"}
    return branch_config


def _warn_of_shared_thread(graph: Any, config: Any) -> None:
    """Warn of episodes that share a thread: each would read the messages of the others."""
    live = current_episode.get()
    saver = graph.checkpointer
    if live is None or live.phase == "trace" or _is_nested() or not hasattr(saver, "aget_tuple"):
        return
    if was_used_by_another(saver, live.id, _thread_id(graph, config)):
        live.warn(
            "shared_thread",
            "Episodes share a thread_id of one checkpointer, so each reads what others have said: give every run a "
            "thread_id of its own, such as str(uuid4()).",
        )


def _in_branch_thread(original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, config: Any, *args: Any, **options: Any) -> Any:
        return original(self, _branch_config(self, config), *args, **options)

    return run


def _is_nested() -> bool:
    """Whether a graph runs around this point."""
    return bool(((var_child_runnable_config.get() or {}).get("configurable") or {}).get("checkpoint_ns"))


def _thread_id(graph: Any, config: Any) -> Any:
    """The thread id in the configuration of a call or, failing that, of the graph."""
    for source in (config, getattr(graph, "config", None)):
        configurable = (source or {}).get("configurable") or {}
        if configurable.get("thread_id"):
            return configurable["thread_id"]
    return None
