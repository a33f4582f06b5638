"""Derives the role of a call from the tree of LangGraph runs around it, as the callbacks reported them.

Pure functions on plain data: this module does not import LangGraph.
"""

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
"""LangGraph's name for a graph without a name."""


class GraphRun(msgspec.Struct):
    """A run in progress."""

    parent: GraphRun | None
    kind: Literal["chain", "node", "tool", "model"]
    name: str
    space: str
    """Namespace of the node execution that it belongs to."""
    agent: str | None
    """The agent's name in the metadata. Metadata are inherited, so it may be the name of an outer graph."""
    source: str | None = None
    """`lc_source` in the metadata: the part of a prebuilt agent that calls the model, such as a summarizer."""
    state: Any = None
    """The input of the innermost node around it."""
    middleware: Any = None
    """The middleware call that it was started in, compared by identity. It is inherited too."""
    nameless: tuple[object, str] | None = None
    """For the run of an outermost graph without a name: the graph, and the place in the code that runs it."""

    @classmethod
    def chain(
        cls, parent: GraphRun | None, name: str | None, metadata: Mapping[str, Any], inputs: Any, middleware: Any = None
    ) -> GraphRun:
        """The first run in a namespace is a node. Any other is a graph or a runnable of another kind."""
        space = metadata.get(_SPACE) or ""
        agent = metadata.get("lc_agent_name")
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
        space = metadata.get(_SPACE) or ""
        agent = metadata.get("lc_agent_name")
        parent = parent or _from_namespace(space, agent)
        return cls(parent, "tool", name or "tool", space, agent, None, getattr(parent, "state", None), middleware)

    @classmethod
    def model(cls, parent: GraphRun | None, metadata: Mapping[str, Any], middleware: Any = None) -> GraphRun:
        """A run of a model. The metadata name its node if the model is the node, or if the enclosing runs
        are unknown.
        """
        space = metadata.get(_SPACE) or ""
        agent = metadata.get("lc_agent_name")
        parent = parent or _from_namespace(space, agent)
        if space and parent is not None and parent.space != space:
            parent = cls(parent, "node", str(metadata.get("langgraph_node") or ""), space, agent)
        return cls(
            parent, "model", "", space, None, metadata.get("lc_source"), getattr(parent, "state", None), middleware
        )


def is_own_node(name: str) -> bool:
    """Whether a node is the application's own. The start and the nodes of prebuilt agents and middleware are not."""
    return not (name.startswith("__") or name in _PREBUILT or name in _HOOKS or name.endswith(_MIDDLEWARE))


def role_of(run: GraphRun) -> str:
    """Role of a model call."""
    return role_and_agent(run)[0]


def is_nameless(name: str) -> bool:
    """Whether a graph with this name has no name of its own."""
    return name in ("", _UNNAMED)


def role_and_agent(run: GraphRun) -> tuple[str, tuple[object, str] | None]:
    """The role of a model call, and the nameless agent that makes it.

    The role consists of the names around the call from the outside in, joined with `/`; it is `app` without any. The
    agent, with the place in the code that runs it, is returned only if nothing else names the call.
    """
    names: list[str] = []
    prebuilt = ""  # the innermost node of a prebuilt agent
    outermost = run
    source = run.source
    inner: GraphRun | None = run
    while inner is not None:
        if inner.kind == "tool":
            names.append(inner.name)
        elif inner.kind == "node":
            if inner.name in _PREBUILT:
                prebuilt = prebuilt or inner.name
            elif inner.name.endswith(_MIDDLEWARE):
                if not names:
                    source = None
                names.append(inner.name.rpartition(".")[0])
            else:
                names.append(inner.name)
            agent = _agent_of_node(inner)
            if agent:
                names.append(agent)  # the role begins with the innermost named agent
                break
        # A middleware is named once, by the outermost run that was started in it.
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


def _agent_of_node(node: GraphRun) -> str | None:
    """The name of the agent whose graph contains a node; None if this graph is no named agent.

    The name in the metadata counts only if it is not inherited from an outer graph. A graph with a node of a prebuilt
    agent is an agent by its own name.
    """
    graph = node.parent
    if graph is None or graph.kind != "chain":
        return None
    agent_of_outer = graph.parent.agent if graph.parent else None
    if graph.agent and (graph.agent == graph.name or graph.agent != agent_of_outer):
        return graph.agent
    is_prebuilt_node = node.name in _PREBUILT or node.name in _HOOKS
    if is_prebuilt_node and not is_nameless(graph.name):
        return graph.name
    return None


def nodes_of(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    """Role and name of each node of a graph, whose run is `run`, and of its subgraphs.

    Nodes of prebuilt agents are left out: they are no parts of the application.
    """
    yield from _nodes(graph, run)
    for space, inner in graph.get_subgraphs(recurse=True):
        # The namespace of a subgraph is the path of the nodes that contain it.
        outer: GraphRun = run
        for name in space.split("|"):
            outer = _node(outer, name)
        yield from _nodes(inner, GraphRun(outer, "chain", inner.name, outer.space, None))


def pauses_of(graph: Any) -> dict[str, str]:
    """Node -> the setting that makes the graph stop before it."""
    pauses: dict[str, str] = {}
    after = getattr(graph, "interrupt_after_nodes", ())
    if after:
        for edge in graph.get_graph().edges:
            if after == "*" or edge.source in after:
                pauses[edge.target] = "interrupt_after"
    before = getattr(graph, "interrupt_before_nodes", ())
    for node in graph.nodes if before == "*" else before:
        pauses[node] = "interrupt_before"
    return pauses


def router_words(graph: Any) -> Iterator[str]:
    """Words in the code of a graph's conditional edges that an answer may have to contain.

    An agent behind an edge such as `"urgent" in answer` never runs in a check unless an answer has this word, and
    neither a prompt nor the graph's declaration mentions it. Only constants of the code are read; nothing is called.
    Names of nodes and of parts of the state are left out.
    """
    declared = {*graph.nodes, *getattr(graph, "channels", ())}
    for branches in getattr(getattr(graph, "builder", None), "branches", {}).values():
        for branch in branches.values():
            function = getattr(branch.path, "func", None) or getattr(branch.path, "afunc", None)
            docstring = getattr(function, "__doc__", None)
            for word in _router_texts(getattr(function, "__code__", None)):
                if word not in declared and word != docstring:
                    yield word


def _router_texts(constant: Any) -> Iterator[str]:
    """Short texts among the constants of a code object, also of the functions inside it."""
    constants = constant.co_consts if isinstance(constant, CodeType) else constant
    if isinstance(constants, tuple | frozenset):
        for inner in sorted(constants, key=str):
            yield from _router_texts(inner)
    elif isinstance(constant, str) and 1 < len(constant) <= 40:
        yield constant


def _nodes(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    for name in getattr(graph, "nodes", ()):
        if is_own_node(name):
            yield role_of(_node(run, name)), name


def _node(run: GraphRun, name: str) -> GraphRun:
    return GraphRun(run, "node", name, f"{run.space}|{name}", None)


def _from_namespace(space: str, agent: str | None, whole: bool = True) -> GraphRun | None:
    """The nodes around a call, read from its namespace. This is for applications that replace LangGraph's callbacks,
    which otherwise report the runs.

    A namespace is `node:id|node:id`, with numbers for parallel graphs of one node. Without `whole`, the innermost node
    is left out.
    """
    nodes = space.split("|") if space else []
    run: GraphRun | None = None
    for end in range(1, len(nodes) + whole):
        if not nodes[end - 1].isdigit():
            run = GraphRun(run, "node", nodes[end - 1].partition(":")[0], "|".join(nodes[:end]), agent)
    return run
