"""LangGraph and LangChain: who makes a call, from the tree of runs that their callback managers report.

A role is the path of the nodes around the call, from the innermost named agent or the outermost graph. Nodes that
prebuilt agents bring along (`model`, `agent`, `tools`) give way to the name of their agent or of the node around it.
Outside an episode each hook costs one read of a ContextVar.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from langchain_core.callbacks import manager as managers
from langchain_core.runnables.config import var_child_runnable_config

from cotune.integrations.apps.langchain.hooks import around
from cotune.integrations.apps.langgraph.graphs import starts
from cotune.integrations.apps.langgraph.run_tree import (
    GraphRun,
    is_nameless,
    named,
    nodes_of,
    pauses_of,
    role_of,
    router_words,
)
from cotune.integrations.apps.patching import replace_method
from cotune.integrations.versions import require_hooks
from cotune.recording.app_parts import Part, Parts
from cotune.recording.call_records import CallerContext
from cotune.recording.context import current_caller, current_episode, current_scope
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveEpisode
from cotune.recording.roles import place_here

NAME = "langgraph"
_MESSAGE_ID = len("lc_run--") + 36
"""Length of the part of a message id that names the run; a number follows it in some versions of the message."""


class _Runs:
    """Runs in progress of one episode, who makes its model calls in flight, and message ids that name no run.

    Runs go by the integer of their UUID: the hash of a UUID itself is a Python function, asked for at every look.
    """

    __slots__ = ("callers", "outputs", "runs")

    def __init__(self) -> None:
        self.runs: dict[int, GraphRun] = {}
        self.callers: dict[int, CallerContext] = {}
        self.outputs: dict[str, str] = {}
        """Output ids of calls, by the message id that a provider gave the answer."""


Observer = Callable[[LiveEpisode, Any, tuple[Any, ...], Mapping[str, Any]], object]
"""Takes the episode, the manager of one run (`run_id`, `parent_run_id`, `metadata`), and the event's arguments."""


def install() -> None:
    """Follow the runs inside episodes, at the managers that report them to callback handlers; find the node of calls
    that no model announces. Raises UnsupportedVersion.

    Not by a handler of our own: LangChain does more for every run as soon as there is one, which costs about as much as
    recording the call.
    """
    starts = {"chain": _chain_starts, "tool": _tool_starts, "retriever": _retriever_starts, "chat_model": _model_starts}
    for like in ("", "Async"):
        for kind, observe in starts.items():
            _hook(f"{like}CallbackManager", f"on_{kind}_start", _observed_start, observe)
        for kind in ("chain", "tool", "retriever"):
            for event in ("end", "error"):
                _hook(f"{like}CallbackManagerFor{kind.title()}Run", f"on_{kind}_{event}", _observed_end, _run_ends)
        for event in ("end", "error"):
            _hook(f"{like}CallbackManagerForLLMRun", f"on_llm_{event}", _observed_end, _model_ends)
    hooks.scope_finders.append(_node_scope)


def _hook(manager: str, event: str, wrapper: Callable[[Any, Observer], Any], observe: Observer) -> None:
    require_hooks("langchain-core", managers, manager)
    cls: type = getattr(managers, manager)
    require_hooks("langchain-core", cls, event)
    replace_method(cls, event, lambda original: wrapper(original, observe))


def _observed_start(original: Any, observe: Observer) -> Any:
    """`original`, which starts a run; a chat model starts one for each of its prompts. `observe` is called after it."""

    def started(made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        episode = current_episode.get()
        if episode is None:
            return made
        try:
            if not isinstance(made, list):
                observe(episode, made, args, kwargs)
                return made
            prompts = args[1] if len(args) > 1 else kwargs.get("messages") or ()
            for run, prompt in zip(made, prompts, strict=False):
                observe(episode, run, (None, [prompt]), kwargs)
        except Exception as error:  # noqa: BLE001
            _count(episode, error)
        return made

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        return started(original(self, *args, **kwargs), args, kwargs)

    async def start_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return started(await original(self, *args, **kwargs), args, kwargs)

    return start_async if inspect.iscoroutinefunction(original) else start


def _observed_end(original: Any, observe: Observer) -> Any:
    """`original`, which ends a run; `observe` is called before it, also where no handler hears of the end."""

    def end(self: Any, *args: Any, **kwargs: Any) -> Any:  # awaitable where the original is
        episode = current_episode.get()
        if episode is not None:
            try:
                observe(episode, self, args, kwargs)
            except Exception as error:  # noqa: BLE001
                _count(episode, error)
        return original(self, *args, **kwargs)

    return end


def _count(episode: LiveEpisode, error: Exception) -> None:
    """A fault of the recorder's own must not become the application's."""
    episode.warn("langgraph", "The LangGraph integration failed.", error)


def runner(app: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """Run a compiled graph on an input, each time as a thread of its own; None for any other object."""
    if isinstance(app, type) or not hasattr(app, "ainvoke") or not hasattr(app, "get_state"):
        return None

    def run(given: Any) -> Awaitable[Any]:
        thread = {"thread_id": str(uuid4())}
        # LangGraph adds the id to the metadata itself, but into a ChainMap that is slow at every merge.
        awaited: Awaitable[Any] = app.ainvoke(given, {"configurable": thread, "metadata": dict(thread)})
        return awaited

    return run


def _runs(episode: LiveEpisode) -> _Runs:
    runs: _Runs = episode.notes.get(NAME) or episode.notes.setdefault(NAME, _Runs())
    return runs


def _chain_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    known = _runs(episode)
    graph = around.get().starting_graph
    if graph is not None:
        starts(None)
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
    name = kwargs.get("name") if graph is None else graph.name
    started = known.runs[run.run_id.int] = GraphRun.chain(
        _parent(known, run), name, run.metadata, inputs, around.get().middleware
    )
    if graph is not None and started.parent is None:
        episode.notes["waits"] = False
        if is_nameless(graph.name):
            started.nameless = (graph, place_here())
    if episode.parts is not None:
        _report_parts(episode.parts, started, graph)


def _report_parts(parts: Parts, run: GraphRun, graph: Any) -> None:
    if run.kind == "node":
        parts.enter(role_of(run))
    if graph is not None:
        pauses = pauses_of(graph)
        parts.add(Part(role, "node", graph.name, name, pauses.get(name, "")) for role, name in nodes_of(graph, run))
        parts.add_words(router_words(graph))


def _tool_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    known = _runs(episode)
    serialized = args[0] if args else kwargs.get("serialized")
    name = kwargs.get("name") or (serialized or {}).get("name")
    known.runs[run.run_id.int] = GraphRun.tool(_parent(known, run), name, run.metadata, around.get().middleware)


def _retriever_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    known = _runs(episode)
    known.runs[run.run_id.int] = GraphRun.chain(_parent(known, run), "", run.metadata, None, around.get().middleware)


def _run_ends(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    ended = _runs(episode).runs.pop(run.run_id.int, None)
    error = args[0] if args else None
    if not isinstance(error, Exception) or ended is None:
        return
    if type(error).__name__ == "GraphInterrupt":
        episode.notes["waits"] = True  # until a graph runs again
    elif ended.parent is None:
        episode.notes.setdefault("raised", []).append(error)


def _model_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    known = _runs(episode)
    made = GraphRun.model(_parent(known, run), run.metadata, around.get().middleware)
    read = []
    for message in args[1][0]:
        name = message.id
        if name and name.startswith("lc_run--"):
            read.append(name[:_MESSAGE_ID])
        elif name and name in known.outputs:
            read.append(known.outputs[name])
    caller: CallerContext | None = None
    scope = current_scope.get()
    if scope is not None:  # one of another framework (a crew's agent), which may be at work inside the model's node
        here, node = _node_scope(), _node_of(made)
        if (here.scope_id if here else None) == node and node in (None, scope.found):
            caller = scope.caller()
    if caller is None:
        role, agent = named(made)
        caller = CallerContext(role, NAME, state=made.state, nameless=agent)
    caller.read, caller.output = (*caller.read, *read), f"lc_run--{run.run_id}"
    caller.thread = _thread(var_child_runnable_config.get())
    known.callers[run.run_id.int] = caller
    current_caller.set(caller)


def _model_ends(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    known = _runs(episode)
    caller = known.callers.pop(run.run_id.int, None)
    if caller is None:
        return
    caller.done = True  # where a model runs in a context of its own, resetting the ContextVar would be lost
    response = args[0] if args else kwargs.get("response")
    if response is None or isinstance(response, BaseException):
        return
    for generation in response.generations[0]:
        name = getattr(getattr(generation, "message", None), "id", None)
        if name and not name.startswith("lc_run--"):
            known.outputs[name] = str(caller.output)
    if not caller.calls:
        episode.warn(
            "unseen_call",
            f"A chat model answered role {caller.role!r} without a call that can be recorded: from LangChain's cache "
            "or by a client of its own. Switch the cache off while recording.",
        )


def _parent(known: _Runs, run: Any) -> GraphRun | None:
    """The run that a new one belongs to: the one it names, or where the application replaced its callbacks, the one
    whose code runs here."""
    named = known.runs.get(run.parent_run_id.int) if run.parent_run_id else None
    return named or _here(known, var_child_runnable_config.get())


def _here(known: _Runs, config: Any) -> GraphRun | None:
    """The run whose code runs here."""
    run_id = getattr((config or {}).get("callbacks"), "parent_run_id", None)
    return known.runs.get(run_id.int) if run_id else None


def _node_scope() -> CallerContext | None:
    """The node around a call that no chat model announces: the plain SDK, or a model called in a tool."""
    episode = current_episode.get()
    config = var_child_runnable_config.get()
    if episode is None or not config:
        return None
    run = GraphRun.model(_here(_runs(episode), config), config.get("metadata") or {}, around.get().middleware)
    role, agent = named(run)
    if role == "app":
        return None
    thread = _thread(config)
    return CallerContext(role, NAME, state=run.state, scope_id=_node_of(run), thread=thread, nameless=agent)


def _thread(config: Any) -> str | None:
    """The thread in which a checkpointer keeps the graph whose node runs here."""
    known = (config or {}).get("configurable") or {}
    thread = known.get("thread_id")
    return str(thread) if thread and known.get("__pregel_checkpointer") else None


def _node_of(run: GraphRun | None) -> str | None:
    """The innermost execution of a node around a run, by its namespace."""
    while run is not None and run.kind != "node":
        run = run.parent
    return run.space if run else None
