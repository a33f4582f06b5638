"""Threads of LangGraph's checkpointers: each branch of a replay has its own, and episodes of a run do not share one."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.runnables.config import var_child_runnable_config

from cotune.recording.context import current_episode
from cotune.replay.responder import ReplayResponder

_OF_THREADS = (
    "get_state", "aget_state", "get_state_history", "aget_state_history", "update_state", "aupdate_state",
    "bulk_update_state", "abulk_update_state",
)  # fmt: skip
"""Methods of a graph that take the configuration of a thread first."""


def install(pregel: Any) -> None:
    """Hook the methods that look at a thread."""
    for name in _OF_THREADS:
        if (original := getattr(pregel, name, None)) is not None:
            setattr(pregel, name, _with_own_thread(original))


def own_thread(graph: Any, config: Any) -> Any:
    """`config`, with a thread of this branch's own in place of one of its trunk: an application may name both alike."""
    responder = _replaying()
    if responder is None or _nested():
        return config
    thread = _thread(graph, config)
    if str(thread) not in responder.replay.script.threads:
        return config
    live = current_episode.get()
    given = dict(config or {})
    own = f"{thread}@{live.id if live else ''}"
    return {**given, "configurable": {**(given.get("configurable") or {}), "thread_id": own}}


def watch_thread(graph: Any, config: Any) -> None:
    """Warn where episodes of a run share a thread: each would read what the others said."""
    live, saver = current_episode.get(), graph.checkpointer
    if live is None or live.phase == "trace" or _nested() or not hasattr(saver, "aget_tuple"):
        return
    if _episodes.setdefault(saver, {}).setdefault(_thread(graph, config), live.id) != live.id:
        live.warn(
            "shared_thread",
            "Episodes share a thread_id of one checkpointer, so each reads what others have said: give every run a "
            "thread_id of its own, such as str(uuid4()).",
        )


_episodes: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()
"""By checkpointer: the first episode in each thread."""


def _with_own_thread(original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, config: Any, *args: Any, **options: Any) -> Any:
        return original(self, own_thread(self, config), *args, **options)

    return run


def _replaying() -> ReplayResponder | None:
    live = current_episode.get()
    responder = None if live is None else live.responder
    return responder if isinstance(responder, ReplayResponder) else None


def _nested() -> bool:
    """Whether a graph runs around this point."""
    return bool(((var_child_runnable_config.get() or {}).get("configurable") or {}).get("checkpoint_ns"))


def _thread(graph: Any, config: Any) -> Any:
    known = [(one or {}).get("configurable") or {} for one in (config, getattr(graph, "config", None))]
    return next((given["thread_id"] for given in known if given.get("thread_id")), None)
