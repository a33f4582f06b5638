"""Branches of a replay and LangGraph's checkpoints: each has threads of its own, and may go on from the checkpoint
before the node at which it forks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.runnables.config import var_child_runnable_config

from cotune.recording.context import current_episode
from cotune.recording.recorder import LiveEpisode
from cotune.records.structs import Checkpointed
from cotune.replay.responder import ReplayResponder
from cotune.replay.resume import calls_before, leave_out, resume_point

_OF_THREADS = (
    "get_state", "aget_state", "get_state_history", "aget_state_history", "update_state", "aupdate_state",
    "bulk_update_state", "abulk_update_state",
)  # fmt: skip
"""Methods of a graph that take the configuration of a thread first."""


def install(pregel: Any) -> None:
    """Hook the methods that run a graph to its end, and those that look at a thread."""
    invoke, ainvoke = pregel.invoke, pregel.ainvoke

    @functools.wraps(invoke)
    def resumed_invoke(self: Any, input: Any, config: Any = None, **options: Any) -> Any:
        config = own_thread(self, config)
        if (found := _resuming(self, input, config, options)) is not None:
            taken = found.saver.get_tuple(found.own)
            if (start := found.start(taken, list(found.saver.list(found.trunk)))) is not None:
                found.saver.put(*start)
                input = None
        return invoke(self, input, config, **options)

    @functools.wraps(ainvoke)
    async def resumed_ainvoke(self: Any, input: Any, config: Any = None, **options: Any) -> Any:
        config = own_thread(self, config)
        if (found := _resuming(self, input, config, options)) is not None:
            taken = await found.saver.aget_tuple(found.own)
            if (start := found.start(taken, [one async for one in found.saver.alist(found.trunk)])) is not None:
                await found.saver.aput(*start)
                input = None
        return await ainvoke(self, input, config, **options)

    pregel.invoke, pregel.ainvoke = resumed_invoke, resumed_ainvoke
    for name in _OF_THREADS:
        if (original := getattr(pregel, name, None)) is not None:
            setattr(pregel, name, _with_own_thread(original))


def own_thread(graph: Any, config: Any) -> Any:
    """`config`, with a thread of this branch's own in place of one of its trunk: an application may name both alike."""
    responder = _replaying()
    if responder is None or _nested():
        return config
    thread = _thread(graph, config)
    if not any(one.thread == thread for one in responder.replay.script.checkpoints):
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


def _resuming(graph: Any, input: Any, config: Any, options: Mapping[str, Any]) -> _Resuming | None:
    """How this run of a graph could go on from a checkpoint of the trunk."""
    live, responder = current_episode.get(), _replaying()
    if live is None or responder is None or _nested():
        return None
    point = resume_point(responder)
    saver = (graph.config or {}).get("configurable", {}).get("__pregel_checkpointer") or graph.checkpointer
    if point is None or not hasattr(saver, "aget_tuple") or not (thread := _thread(graph, config)):
        return None
    return _Resuming(graph, input, options, live, responder, point, saver, str(thread))


@dataclasses.dataclass
class _Resuming:
    graph: Any
    input: Any
    options: Mapping[str, Any]
    live: LiveEpisode
    responder: ReplayResponder
    point: Checkpointed
    saver: Any
    thread: str

    @property
    def own(self) -> dict[str, Any]:
        return {"configurable": {"thread_id": self.thread, "checkpoint_ns": ""}}

    @property
    def trunk(self) -> dict[str, Any]:
        return {"configurable": {"thread_id": self.point.thread}}

    def start(self, taken: Any, saved: Sequence[Any]) -> tuple[Any, ...] | None:
        """What to put into the branch's own thread so that the graph goes on from the fork, whose calls before it are
        recorded then; None, with the reason counted, where the graph must run from its start."""
        found = "its thread has a state already" if taken is not None else self._found(saved)
        calls = found if isinstance(found, str) else calls_before(self.responder, self.point)
        if isinstance(found, str) or isinstance(calls, str):
            text = f"A branch runs from its start instead of from a checkpoint: {calls}."
            self.live.warn("not_resumed", text)
            return None
        if not calls:
            return None  # the fork is in the first step of the graph
        leave_out(self.live, self.responder, calls, datetime.fromisoformat(found.checkpoint["ts"]).timestamp())
        return self.own, found.checkpoint, found.metadata, found.checkpoint["channel_versions"]

    def _found(self, saved: Sequence[Any]) -> Any:
        """The checkpoint before the fork, or why it cannot be used."""
        if "|" in self.point.space:
            return "the fork is in a graph within the graph"
        if self.options.get("stream_mode", "values") != "values":
            return "the application sees the parts of the run"
        if any(type(channel).__name__ == "DeltaChannel" for channel in self.graph.channels.values()):
            return "a channel keeps its state in more than one checkpoint"
        if any(":" not in space.rpartition("|")[2] for one in saved if (space := _space(one))):
            return "a graph within the graph keeps a state of its own"
        outer = {one.checkpoint["id"]: one for one in saved if not _space(one)}
        if (found := outer.get(self.point.checkpoint)) is None:
            return "the checkpoint is not known here (kept in another process, or only at the end of a run)"
        path, at = [], found
        while at is not None:
            path.append(at)
            at = outer.get(((at.parent_config or {}).get("configurable") or {}).get("checkpoint_id"))
        first, *later = reversed(path)
        if first.metadata.get("step") != -1 or any(one.metadata.get("source") != "loop" for one in later):
            return "its thread went through more than one run"
        asked = first.checkpoint["channel_values"].get("__start__")
        return found if asked is not None and _plain(asked) == _plain(self.input) else "its input is another"


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


def _space(saved: Any) -> str:
    return str(saved.config["configurable"].get("checkpoint_ns") or "")


def _plain(value: Any) -> Any:
    """A value without the ids that the framework gives to messages."""
    if hasattr(value, "model_dump"):
        value = {"type": type(value).__name__, **value.model_dump()}
        value.pop("id", None)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
