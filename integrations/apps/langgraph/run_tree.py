"""Names a role from a tree of LangGraph runs. A pure function of what the callbacks reported, without the framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, Literal

import msgspec

_PREBUILT = frozenset({"agent", "model", "tools", "generate_structured_response"})
_HOOKS = frozenset({"pre_model_hook", "post_model_hook"})
_MIDDLEWARE = (".before_agent", ".before_model", ".after_model", ".after_agent")
_SPACE = "langgraph_checkpoint_ns"
_UNNAMED = "LangGraph"
"""What LangGraph calls a graph without a name."""


class GraphRun(msgspec.Struct):
    """A run in progress. `space` is the namespace of the node execution it belongs to; `agent` the agent name that the
    metadata claims, which is inherited and so may belong to an outer graph; `state` the input of the innermost node
    around it; `middleware` the middleware call that it was started in, by identity, which is inherited too; `nameless`
    the graph, and where it is run, where this is the run of an outermost graph without a name."""

    parent: GraphRun | None
    kind: Literal["chain", "node", "tool", "model"]
    name: str
    space: str
    agent: str | None
    source: str | None = None
    state: Any = None
    middleware: Any = None
    nameless: tuple[object, str] | None = None

    @classmethod
    def chain(
        cls, parent: GraphRun | None, name: str | None, metadata: Mapping[str, Any], inputs: Any, middleware: Any = None
    ) -> GraphRun:
        """A node when it is the first run in its namespace, else a graph or any other runnable."""
        space, agent = metadata.get(_SPACE) or "", metadata.get("lc_agent_name")
        node = metadata.get("langgraph_node")
        if space and parent is None:
            parent = _from_namespace(space, agent, whole=name != node)
        if space and (parent is None or parent.space != space):
            return cls(parent, "node", str(node or name), space, agent, None, inputs, middleware)
        return cls(parent, "chain", name or "", space, agent, None, getattr(parent, "state", None), middleware)

    @classmethod
    def tool(
        cls, parent: GraphRun | None, name: str | None, metadata: Mapping[str, Any], middleware: Any = None
    ) -> GraphRun:
        space, agent = metadata.get(_SPACE) or "", metadata.get("lc_agent_name")
        parent = parent or _from_namespace(space, agent)
        return cls(parent, "tool", name or "tool", space, agent, None, getattr(parent, "state", None), middleware)

    @classmethod
    def model(cls, parent: GraphRun | None, metadata: Mapping[str, Any], middleware: Any = None) -> GraphRun:
        """A model call; where the node is the model itself, or the runs around it are unknown, metadata name them."""
        space, agent = metadata.get(_SPACE) or "", metadata.get("lc_agent_name")
        parent = parent or _from_namespace(space, agent)
        if space and parent is not None and parent.space != space:
            parent = cls(parent, "node", str(metadata.get("langgraph_node") or ""), space, agent)
        return cls(
            parent, "model", "", space, None, metadata.get("lc_source"), getattr(parent, "state", None), middleware
        )


def is_own_node(name: str) -> bool:
    """Whether a node is the application's own: not the start, nor what prebuilt agents and middleware bring along."""
    return not (name.startswith("__") or name in _PREBUILT or name in _HOOKS or name.endswith(_MIDDLEWARE))


def role_of(run: GraphRun) -> str:
    """Role of a model call."""
    return named(run)[0]


def is_nameless(name: str) -> bool:
    """Whether this is what a graph is called that has no name."""
    return name in ("", _UNNAMED)


def named(run: GraphRun) -> tuple[str, tuple[object, str] | None]:
    """Role of a model call: names around it from the outside in, joined with `/`; `app` when there are none. And the
    agent without a name that makes it, and where it is run, if nothing else names the call."""
    names: list[str] = []
    prebuilt = ""  # the innermost node that a prebuilt agent brings along
    outermost = run
    source = run.source
    inner: GraphRun | None = run
    while inner is not None:
        if inner.kind == "tool":
            names.append(inner.name)
        elif inner.kind == "node":
            hidden = inner.name in _PREBUILT
            prebuilt = prebuilt or (inner.name if hidden else "")
            if not hidden:
                source = None if not names and inner.name.endswith(_MIDDLEWARE) else source
                names.append(inner.name.rpartition(".")[0] if inner.name.endswith(_MIDDLEWARE) else inner.name)
            # The agent whose graph this is. A claimed name counts where it is the graph's own, not an outer one's.
            graph = inner.parent
            if graph is not None and graph.kind == "chain":
                outer = graph.parent.agent if graph.parent else None
                agent = graph.agent if graph.agent == graph.name or graph.agent != outer else None
                if not agent and (hidden or inner.name in _HOOKS) and not is_nameless(graph.name):
                    agent = graph.name
                if agent:
                    names.append(agent)
                    break
        if inner.middleware is not None and inner.middleware is not (inner.parent.middleware if inner.parent else None):
            names.append(source or inner.middleware.name)
            source = None
        outermost = inner
        inner = inner.parent
    if source:
        names.insert(0, source)
    if names:
        return "/".join(reversed(names)), None
    return prebuilt or "app", outermost.nameless if prebuilt else None


def nodes_of(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    """Role and name of each node of a graph whose run is `run`, and of the graphs that are nodes or are known to be
    called in one. Those that prebuilt agents bring along are no parts of the application."""
    yield from _nodes(graph, run)
    for space, inner in graph.get_subgraphs(recurse=True):
        outer: GraphRun = run
        for name in space.split("|"):
            outer = _node(outer, name)
        yield from _nodes(inner, GraphRun(outer, "chain", inner.name, outer.space, None))


def pauses_of(graph: Any) -> dict[str, str]:
    """By node: the setting by which a graph stops before it."""
    before, after = (getattr(graph, f"interrupt_{when}_nodes", ()) for when in ("before", "after"))
    behind = (
        {e.target: "interrupt_after" for e in graph.get_graph().edges if e.source in after or after == "*"}
        if after
        else {}
    )
    return behind | dict.fromkeys(graph.nodes if before == "*" else before, "interrupt_before")


def router_words(graph: Any) -> Iterator[str]:
    """The words in the code of a graph's conditional edges that name neither a node nor a part of its state: those that
    an answer may have to say.

    Only constants are read, and nothing is called. Without them, an agent behind an edge such as `"urgent" in answer`
    never runs in a check: no prompt and no declaration of the graph has this word.
    """
    known = {*graph.nodes, *getattr(graph, "channels", ())}
    for branches in getattr(getattr(graph, "builder", None), "branches", {}).values():
        for branch in branches.values():
            function = getattr(branch.path, "func", None) or getattr(branch.path, "afunc", None)
            own = {*known, getattr(function, "__doc__", None)}
            yield from (word for word in _words(getattr(function, "__code__", None)) if word not in own)


def _words(constant: Any) -> Iterator[str]:
    """Short texts in code, or in a constant of it."""
    constants = constant.co_consts if isinstance(constant, CodeType) else constant
    if isinstance(constants, tuple | frozenset):
        for inner in sorted(constants, key=str):
            yield from _words(inner)
    elif isinstance(constant, str) and 1 < len(constant) <= 40:
        yield constant


def _nodes(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    for name in getattr(graph, "nodes", ()):
        if is_own_node(name):
            yield role_of(_node(run, name)), name


def _node(run: GraphRun, name: str) -> GraphRun:
    return GraphRun(run, "node", name, f"{run.space}|{name}", None)


def _from_namespace(space: str, agent: str | None, whole: bool = True) -> GraphRun | None:
    """Nodes whose runs are unknown, because the application replaced its callbacks on the way; with the innermost node,
    or (not `whole`) without it. A namespace is `node:id|node:id`, with numbers for parallel graphs of one node."""
    parts = space.split("|") if space else []
    run: GraphRun | None = None
    for end in range(1, len(parts) + whole):
        if not parts[end - 1].isdigit():
            run = GraphRun(run, "node", parts[end - 1].partition(":")[0], "|".join(parts[:end]), agent)
    return run
