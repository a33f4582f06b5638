"""LangGraph and LangChain: who makes a call, from the tree of runs that their callbacks tell.

A role is the path of the nodes around the call, from the innermost named agent or the outermost graph. Nodes that
prebuilt agents bring along (`model`, `agent`, `tools`) give way to the name of their agent or of the node around it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from cotune.context import Mark, current_episode, current_mark, scopes
from cotune.integrations.langchain_middleware import around
from cotune.integrations.langgraph_graphs import starting
from cotune.integrations.langgraph_runs import Run, role_of
from cotune.recorder import LiveEpisode

NAME = "langgraph"
_MESSAGE_ID = len("lc_run--") + 36
"""Length of the part of a message id that names the run; a number follows it in some versions of the message."""


class _Notes:
    """Runs in progress of one episode, the marks of its model calls in flight, and message ids that name no run."""

    __slots__ = ("episode", "ids", "marks", "runs")

    def __init__(self, episode: LiveEpisode) -> None:
        self.episode = episode
        self.ids: dict[str, str] = {}
        self.runs: dict[UUID, Run] = {}
        self.marks: dict[UUID, Mark] = {}


def install() -> None:
    """Register the callback handler, active inside episodes only, and name the scope of calls that have no mark."""
    register_configure_hook(_Within(), inheritable=True)
    scopes.append(_scope)


def runner(app: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """Run a compiled graph on an input, each time as a thread of its own; None for what is no compiled graph."""
    if not hasattr(app, "ainvoke") or not hasattr(app, "get_state"):
        return None

    async def run(given: Any) -> Any:
        return await app.ainvoke(given, {"configurable": {"thread_id": str(uuid4())}})

    return run


def _notes(episode: LiveEpisode) -> _Notes:
    notes = episode.notes.get(NAME)
    if notes is None:
        notes = episode.notes.setdefault(NAME, _Notes(episode))
    return notes


def _counted(method: Any) -> Any:
    """A fault of the recorder's own must not vanish in the framework's log."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        episode = current_episode.get()
        if episode is None:
            return
        try:
            method(self, episode.notes.get(NAME) or _notes(episode), *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            episode.warn("langgraph", "The LangGraph integration failed.", error)

    return call


class _Handler(BaseCallbackHandler):
    run_inline = True
    ignore_custom_event = True
    ignore_retry = True

    @_counted
    def on_chain_start(
        self,
        notes: _Notes,
        serialized: Any,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        name: str | None = None,
        **_: Any,
    ) -> None:
        graph = starting.get()
        if graph is not None:
            starting.set(None)
        parent = _parent(notes, parent_run_id)
        notes.runs[run_id] = Run.chain(parent, graph or name, metadata or {}, inputs, around.get())

    @_counted
    def on_tool_start(
        self,
        notes: _Notes,
        serialized: Any,
        text: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        name: str | None = None,
        **_: Any,
    ) -> None:
        parent, name = _parent(notes, parent_run_id), name or (serialized or {}).get("name")
        notes.runs[run_id] = Run.tool(parent, name, metadata or {}, around.get())

    @_counted
    def on_retriever_start(
        self,
        notes: _Notes,
        serialized: Any,
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        notes.runs[run_id] = Run.chain(_parent(notes, parent_run_id), "", metadata or {}, None, around.get())

    @_counted
    def on_chat_model_start(
        self,
        notes: _Notes,
        serialized: Any,
        messages: list[list[Any]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        run = Run.model(_parent(notes, parent_run_id), metadata or {}, around.get())
        read = tuple(
            m.id[:_MESSAGE_ID] if m.id.startswith("lc_run--") else notes.ids[m.id]
            for m in messages[0]
            if m.id and (m.id.startswith("lc_run--") or m.id in notes.ids)
        )
        by = _entered_within(run) or Mark(role_of(run), NAME, state=run.state)
        mark = Mark(by.role, by.integration, state=by.state, read=(*by.read, *read), output=f"lc_run--{run_id}")
        notes.marks[run_id] = mark
        current_mark.set(mark)

    @_counted
    def on_llm_end(self, notes: _Notes, response: Any, *, run_id: UUID, **_: Any) -> None:
        mark = self._done(notes, run_id)
        if mark is None:
            return
        for generation in response.generations[0]:
            name = getattr(getattr(generation, "message", None), "id", None)
            if name and not name.startswith("lc_run--"):
                notes.ids[name] = str(mark.output)
        if not mark.calls:
            notes.episode.warn(
                "unseen_call",
                f"A chat model answered role {mark.role!r} without a call that can be recorded: from LangChain's cache "
                "or by a client of its own. Switch the cache off while recording.",
            )

    @_counted
    def on_llm_error(self, notes: _Notes, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self._done(notes, run_id)

    def _done(self, notes: _Notes, run_id: UUID) -> Mark | None:
        # In async code this runs in a copied context, where resetting the ContextVar would be lost.
        mark = notes.marks.pop(run_id, None)
        if mark is not None:
            mark.done = True
        return mark

    @_counted
    def on_chain_end(self, notes: _Notes, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        notes.runs.pop(run_id, None)

    on_chain_error = on_chain_end
    on_tool_end = on_chain_end
    on_tool_error = on_chain_end
    on_retriever_end = on_chain_end
    on_retriever_error = on_chain_end


_HANDLER = _Handler()


class _Within:
    """Stands for a ContextVar: holds the handler inside an episode, and nothing outside."""

    def get(self) -> _Handler | None:
        return _HANDLER if current_episode.get() is not None else None


def _parent(notes: _Notes, run_id: UUID | None) -> Run | None:
    """The run that a new one belongs to: the one told, or where the application replaced its callbacks, the one whose
    code runs here."""
    return notes.runs.get(run_id) or notes.runs.get(_here(var_child_runnable_config.get()))


def _here(config: Any) -> Any:
    return getattr((config or {}).get("callbacks"), "parent_run_id", None)


def _scope() -> Mark | None:
    """The node around a call that no chat model announces: the plain SDK, or a model called in a tool."""
    episode = current_episode.get()
    config = var_child_runnable_config.get()
    if episode is None or not config:
        return None
    run = Run.model(_notes(episode).runs.get(_here(config)), config.get("metadata") or {}, around.get())
    role = role_of(run)
    return Mark(role, NAME, state=run.state, unit=_node_of(run)) if role != "app" else None


def _entered_within(run: Run) -> Mark | None:
    """A scope of another framework (a crew's agent) that a model call was reached through, inside the call's node."""
    if len(scopes) == 1:
        return None
    here = _scope()
    if (here.unit if here else None) != _node_of(run):
        return None
    return next((found for other in scopes if other is not _scope and (found := other()) is not None), None)


def _node_of(run: Run | None) -> str | None:
    """The innermost execution of a node around a run, by its namespace."""
    while run is not None and run.kind != "node":
        run = run.parent
    return run.space if run else None
