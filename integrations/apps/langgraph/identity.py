"""LangGraph and LangChain: finds the role of a call from the tree of runs that their callback managers report.

A role is the path of the nodes around the call. It begins at the innermost named agent, or at the outermost graph. Not
the nodes of prebuilt agents (`model`, `agent`, `tools`) are named, but the agent or the node around it. Outside an
episode each hook costs one read of a ContextVar.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from langchain_core.callbacks import manager as managers
from langchain_core.runnables.config import var_child_runnable_config

from cotune.integrations.apps.langchain.hooks import around
from cotune.integrations.apps.langgraph.graphs import expect_run
from cotune.integrations.apps.langgraph.run_tree import (
    GraphRun,
    is_nameless,
    nodes_of,
    pauses_of,
    role_and_agent,
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
_LENGTH_OF_RUN_NAME = len("lc_run--") + 36
"""Length of the part of a message id that names the run, which ends with a UUID."""


class _Runs:
    """Runs in progress of one episode, and callers of its model calls in progress.

    Keys are the integers of the runs' UUIDs: the hash of a UUID is a Python function, which every look-up would call.
    """

    __slots__ = ("callers", "outputs", "runs")

    def __init__(self) -> None:
        self.runs: dict[int, GraphRun] = {}
        self.callers: dict[int, CallerContext] = {}
        self.outputs: dict[str, str] = {}
        """Message id that a provider gave an answer -> output id of its call."""


Observer = Callable[[LiveEpisode, Any, tuple[Any, ...], Mapping[str, Any]], object]
"""Takes the episode, the manager of one run (`run_id`, `parent_run_id`, `metadata`), and the event's arguments."""


def install() -> None:
    """Hook the managers that report runs to callback handlers, to follow the runs inside episodes.

    A callback handler would be the usual way, but LangChain does more work for every run as soon as there is one, about
    as much as recording the call. Raises UnsupportedVersion.
    """
    observers = {
        "chain": _chain_starts,
        "tool": _tool_starts,
        "retriever": _retriever_starts,
        "chat_model": _model_starts,
    }
    for prefix in ("", "Async"):
        for kind, observe in observers.items():
            _hook_manager(f"{prefix}CallbackManager", f"on_{kind}_start", _observed_start, observe)
        for kind in ("chain", "tool", "retriever"):
            run_manager = f"{prefix}CallbackManagerFor{kind.title()}Run"
            for event in ("end", "error"):
                _hook_manager(run_manager, f"on_{kind}_{event}", _observed_end, _run_ends)
        for event in ("end", "error"):
            _hook_manager(f"{prefix}CallbackManagerForLLMRun", f"on_llm_{event}", _observed_end, _model_ends)
    hooks.scope_finders.append(_node_scope)


def _hook_manager(manager: str, event: str, wrapper: Callable[[Any, Observer], Any], observe: Observer) -> None:
    require_hooks("langchain-core", managers, manager)
    cls: type = getattr(managers, manager)
    require_hooks("langchain-core", cls, event)
    replace_method(cls, event, lambda original: wrapper(original, observe))


def _observed_start(original: Any, observe: Observer) -> Any:
    """Wrap a method that starts a run, or one for each prompt of a chat model. `observe` is called after it."""

    def observe_all(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Observe the runs that a callback manager has started, and return its result, which is a run or a list.

        An error of an observer is counted as a warning, and never reaches the application.
        """
        episode = current_episode.get()
        if episode is None:
            return result
        try:
            if not isinstance(result, list):
                observe(episode, result, args, kwargs)
                return result
            # A chat model starts one run for each of its prompts. Each run is observed with its own prompt.
            prompts = args[1] if len(args) > 1 else kwargs.get("messages") or ()
            for run, prompt in zip(result, prompts, strict=False):
                observe(episode, run, (None, [prompt]), kwargs)
        except Exception as error:  # noqa: BLE001
            _warn_of_error(episode, error)
        return result

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        return observe_all(original(self, *args, **kwargs), args, kwargs)

    async def start_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return observe_all(await original(self, *args, **kwargs), args, kwargs)

    return start_async if inspect.iscoroutinefunction(original) else start


def _observed_end(original: Any, observe: Observer) -> Any:
    """Wrap a method that ends a run. `observe` is called before it, also if no handler is notified of the end."""

    def end(self: Any, *args: Any, **kwargs: Any) -> Any:  # awaitable where the original is
        """Observe the end of a run, then do what the original method does."""
        episode = current_episode.get()
        if episode is not None:
            try:
                observe(episode, self, args, kwargs)
            except Exception as error:  # noqa: BLE001
                _warn_of_error(episode, error)
        return original(self, *args, **kwargs)

    return end


def _warn_of_error(episode: LiveEpisode, error: Exception) -> None:
    """Report an error of the integration as a warning: it must not break the application."""
    episode.warn("langgraph", "The LangGraph integration failed.", error)


def runner(app: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """A function that runs a compiled graph on an input, each time in a new thread; None for any other object."""
    if isinstance(app, type) or not hasattr(app, "ainvoke") or not hasattr(app, "get_state"):
        return None

    def run(graph_input: Any) -> Awaitable[Any]:
        thread = {"thread_id": str(uuid4())}  # LangGraph's name for a conversation
        # LangGraph would add the id to the metadata itself, but in a ChainMap, which is slow at every merge.
        awaited: Awaitable[Any] = app.ainvoke(graph_input, {"configurable": thread, "metadata": dict(thread)})
        return awaited

    return run


def _runs(episode: LiveEpisode) -> _Runs:
    runs: _Runs = episode.notes.get(NAME) or episode.notes.setdefault(NAME, _Runs())
    return runs


def _chain_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Observer of a chain's start: add its run to the tree of runs.

    Graphs, nodes and plain runnables are all chains. `args` are (serialized, inputs).
    """
    runs = _runs(episode)
    name = kwargs.get("name")
    graph = around.get().starting_graph
    if graph is not None:
        # A graph was started, and this is the first run since then, so it is the run of the graph. The runs after it
        # are runs of the graph's nodes.
        name = graph.name
        expect_run(None)
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
    new_run = GraphRun.chain(_parent_run(runs, run), name, run.metadata, inputs, around.get().middleware)
    runs.runs[run.run_id.int] = new_run
    if graph is not None and new_run.parent is None:
        # A graph that runs again is not waiting for an answer to its interrupt any more.
        episode.notes["waits"] = False
        if is_nameless(graph.name):
            # The line of code that runs a graph distinguishes it from other graphs without a name.
            new_run.nameless = (graph, place_here())
    if episode.parts is not None:
        _report_parts(episode.parts, new_run, graph)


def _report_parts(parts: Parts, run: GraphRun, graph: Any) -> None:
    if run.kind == "node":
        parts.enter(role_of(run))
    if graph is not None:
        pauses = pauses_of(graph)
        parts.add(Part(role, "node", graph.name, name, pauses.get(name, "")) for role, name in nodes_of(graph, run))
        parts.add_words(router_words(graph))


def _tool_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    runs = _runs(episode)
    serialized = args[0] if args else kwargs.get("serialized")
    name = kwargs.get("name") or (serialized or {}).get("name")
    runs.runs[run.run_id.int] = GraphRun.tool(_parent_run(runs, run), name, run.metadata, around.get().middleware)


def _retriever_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    runs = _runs(episode)
    runs.runs[run.run_id.int] = GraphRun.chain(_parent_run(runs, run), "", run.metadata, None, around.get().middleware)


def _run_ends(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Observer of the end or error of a chain, tool or retriever: remove its run. `args[0]` is the outputs or the
    error.

    An interrupt marks the episode as waiting. The error of a run without a parent is noted in `raised`.
    """
    ended = _runs(episode).runs.pop(run.run_id.int, None)
    error = args[0] if args else None
    if not isinstance(error, Exception) or ended is None:
        return
    # Compared by name: only LangGraph has this class, and LangChain runs without it.
    if type(error).__name__ == "GraphInterrupt":
        episode.notes["waits"] = True  # until a graph runs again
    elif ended.parent is None:
        episode.notes.setdefault("raised", []).append(error)


def _model_starts(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Observer of a chat model's start: determine which role calls, and make it the current caller.

    `args` are (serialized, prompts) with exactly one prompt, a list of messages. The caller also gets the outputs of
    earlier calls that the prompt contains.
    """
    runs = _runs(episode)
    model_run = GraphRun.model(_parent_run(runs, run), run.metadata, around.get().middleware)
    caller = _caller_of_scope(model_run)
    if caller is None:
        role, nameless_agent = role_and_agent(model_run)
        caller = CallerContext(role, NAME, state=model_run.state, nameless=nameless_agent)
    _, prompts = args[:2]
    caller.read = (*caller.read, *_outputs_in_prompt(runs, prompts[0]))
    caller.output = f"lc_run--{run.run_id}"
    caller.thread = _thread_here(var_child_runnable_config.get())
    runs.callers[run.run_id.int] = caller
    current_caller.set(caller)


def _caller_of_scope(model_run: GraphRun) -> CallerContext | None:
    """The caller that another framework around the model names, such as a crew's agent; None if no framework does, or
    if a node of the graph is closer to the call.
    """
    scope = current_scope.get()
    if scope is None:
        return None
    caller_by_node = _node_scope()
    running_node = caller_by_node.scope_id if caller_by_node else None
    node_of_model = _node_of(model_run)
    node_around_scope = scope.scope_of_finders
    # The scope is closest to the call if it was entered inside the node that the model runs in.
    if running_node == node_of_model and node_of_model in (None, node_around_scope):
        return scope.caller()
    return None


def _outputs_in_prompt(runs: _Runs, messages: Any) -> list[str]:
    """The output ids of the earlier calls whose answers are among the messages of a prompt."""
    outputs = []
    for message in messages:
        if not message.id:
            continue
        # LangChain names the message of an answer after the run, unless the provider gives it an id.
        if message.id.startswith("lc_run--"):
            # In some versions a number follows the id of the run.
            outputs.append(message.id[:_LENGTH_OF_RUN_NAME])
        elif message.id in runs.outputs:
            outputs.append(runs.outputs[message.id])
    return outputs


def _model_ends(episode: LiveEpisode, run: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Observer of a chat model's end or error: close its caller, and remember the ids of its messages.

    `args[0]` is the response or the error. Warns if the model answered without a recorded call.
    """
    runs = _runs(episode)
    caller = runs.callers.pop(run.run_id.int, None)
    if caller is None:
        return
    caller.done = True  # where a model runs in a context of its own, resetting the ContextVar would be lost
    response = args[0] if args else kwargs.get("response")
    if response is None or isinstance(response, BaseException):
        return
    for generation in response.generations[0]:
        # A provider's own message id does not name the run, so it is mapped to the output id of the call.
        name = getattr(getattr(generation, "message", None), "id", None)
        if name and not name.startswith("lc_run--"):
            runs.outputs[name] = str(caller.output)
    if not caller.calls:
        episode.warn(
            "unseen_call",
            f"A chat model answered role {caller.role!r} without a call that can be recorded: from LangChain's cache "
            "or by a client of its own. Switch the cache off while recording.",
        )


def _parent_run(runs: _Runs, run: Any) -> GraphRun | None:
    """The parent of a new run: the run that it names or, if the application replaced its callbacks, the run whose code
    is executed here."""
    parent = runs.runs.get(run.parent_run_id.int) if run.parent_run_id else None
    return parent or _run_here(runs, var_child_runnable_config.get())


def _run_here(runs: _Runs, config: Any) -> GraphRun | None:
    """The run whose code is executed here, from LangChain's configuration of this context."""
    run_id = getattr((config or {}).get("callbacks"), "parent_run_id", None)
    return runs.runs.get(run_id.int) if run_id else None


def _node_scope() -> CallerContext | None:
    """The caller of a call that no chat model of LangChain announces, such as a call of the plain SDK in a node. None
    outside of graphs.
    """
    episode = current_episode.get()
    config = var_child_runnable_config.get()
    if episode is None or not config:
        return None
    run = GraphRun.model(_run_here(_runs(episode), config), config.get("metadata") or {}, around.get().middleware)
    role, agent = role_and_agent(run)
    if role == "app":
        return None
    thread = _thread_here(config)
    return CallerContext(role, NAME, state=run.state, scope_id=_node_of(run), thread=thread, nameless=agent)


def _thread_here(config: Any) -> str | None:
    """Id of the checkpointer's thread of the graph whose node runs here; None without a checkpointer."""
    configurable = (config or {}).get("configurable") or {}
    thread = configurable.get("thread_id")
    return str(thread) if thread and configurable.get("__pregel_checkpointer") else None


def _node_of(run: GraphRun | None) -> str | None:
    """Namespace of the innermost node execution around a run."""
    while run is not None and run.kind != "node":
        run = run.parent
    return run.space if run else None
