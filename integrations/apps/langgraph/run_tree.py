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
        """A run of a chain, as LangChain calls nodes, graphs and other runnables.

        A graph runs each node in a namespace of its own, so the first run in a namespace is the node. `inputs` is the
        input of the run.
        """
        space = metadata.get(_SPACE) or ""  # the namespace
        agent = metadata.get("lc_agent_name")
        node = metadata.get("langgraph_node")
        if space and parent is None:
            # The runs around this one were not reported, so they are read from the namespace, which is the path of the
            # nodes in progress. If this run is the innermost node itself, it is not its own parent.
            is_innermost_node = name == node
            parent = _from_namespace(space, agent, with_innermost=not is_innermost_node)
        is_first_in_namespace = bool(space) and (parent is None or parent.space != space)
        if is_first_in_namespace:
            return cls(parent, "node", str(node or name), space, agent, state=inputs, middleware=middleware)
        state = getattr(parent, "state", None)
        return cls(parent, "chain", name or "", space, agent, state=state, middleware=middleware)

    @classmethod
    def tool(
        cls, parent: GraphRun | None, name: str | None, metadata: Mapping[str, Any], middleware: Any = None
    ) -> GraphRun:
        """A run of a tool. It belongs to the node around it, which is `parent` or, if LangChain has not reported the
        node, is read from the metadata.
        """
        space = metadata.get(_SPACE) or ""
        agent = metadata.get("lc_agent_name")
        if parent is None:
            parent = _from_namespace(space, agent)
        state = getattr(parent, "state", None)
        return cls(parent, "tool", name or "tool", space, agent, state=state, middleware=middleware)

    @classmethod
    def model(cls, parent: GraphRun | None, metadata: Mapping[str, Any], middleware: Any = None) -> GraphRun:
        """A run of a model, inside the run of its node.

        The node is `parent`. It is read from the metadata if LangChain has not reported it, or if the model itself was
        added to the graph as a node.
        """
        space = metadata.get(_SPACE) or ""
        agent = metadata.get("lc_agent_name")
        if parent is None:
            parent = _from_namespace(space, agent)
        if space and parent is not None and parent.space != space:
            # The model is the node: no run of the node has been reported.
            parent = cls(parent, "node", str(metadata.get("langgraph_node") or ""), space, agent)
        return cls(
            parent,
            kind="model",
            name="",
            space=space,
            agent=None,
            source=metadata.get("lc_source"),
            state=getattr(parent, "state", None),
            middleware=middleware,
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
    names: list[str] = []  # from the call outwards
    innermost_prebuilt_node = ""
    # The part of a prebuilt agent that calls the model, such as a summarizer. It stands for its middleware, whose name
    # would repeat it.
    source = run.source
    outermost = run
    current: GraphRun | None = run
    while current is not None:
        outermost = current
        is_node = current.kind == "node"
        if is_node and current.name in _PREBUILT:
            # Every prebuilt agent has a node with this name, so it says little.
            innermost_prebuilt_node = innermost_prebuilt_node or current.name
        elif is_node and current.name.endswith(_MIDDLEWARE):
            if not names:
                source = None  # the model is called by this node, which has the name of its middleware
            names.append(current.name.rpartition(".")[0])
        elif is_node or current.kind == "tool":
            names.append(current.name)
        agent = _agent_of_node(current) if is_node else None
        if agent:
            names.append(agent)  # the role begins with the innermost named agent
            break
        # A run inherits the middleware of its parent, so the outermost run with a middleware names it.
        outer_middleware = current.parent.middleware if current.parent else None
        if current.middleware is not None and current.middleware is not outer_middleware:
            names.append(source or current.middleware.name)
            source = None
        current = current.parent

    if source:
        names.insert(0, source)
    if names:
        return "/".join(reversed(names)), None
    if innermost_prebuilt_node:
        return innermost_prebuilt_node, outermost.nameless
    return "app", None


def _agent_of_node(node: GraphRun) -> str | None:
    """The name of the agent whose graph contains a node; None if this graph is no named agent."""
    graph = node.parent
    if graph is None or graph.kind != "chain":
        return None
    # LangChain puts an agent's name into the metadata of its graph. Graphs inside it inherit the metadata, and so the
    # name, but are no agents.
    outer_agent = graph.parent.agent if graph.parent else None
    is_inherited = graph.agent == outer_agent and graph.agent != graph.name
    if graph.agent and not is_inherited:
        return graph.agent
    # An agent that a function of LangGraph has built, without this metadata, is known by the names of its nodes.
    is_prebuilt_node = node.name in _PREBUILT or node.name in _HOOKS
    if is_prebuilt_node and not is_nameless(graph.name):
        return graph.name
    return None


def nodes_of(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    """The nodes of a graph and of its subgraphs, each with its role and its name. `run` is the run of the graph.

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
    """Texts of 2 to 40 characters in a constant of Python code: a text, a tuple or set, or the code of a function,
    whose own constants are searched as well.
    """
    if isinstance(constant, str):
        if 1 < len(constant) <= 40:
            yield constant
        return
    inner_constants = constant.co_consts if isinstance(constant, CodeType) else constant
    if isinstance(inner_constants, tuple | frozenset):
        # In a fixed order, as the order of a set changes from process to process.
        for inner_constant in sorted(inner_constants, key=str):
            yield from _router_texts(inner_constant)


def _nodes(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    subgraphs = dict(graph.get_subgraphs())
    for name in getattr(graph, "nodes", ()):
        if not is_own_node(name):
            continue
        node = _node(run, name)
        subgraph: Any = subgraphs.get(name)
        prebuilt_node = next((inner for inner in getattr(subgraph, "nodes", ()) if inner in _PREBUILT), None)
        if prebuilt_node is not None:
            # The node is a prebuilt agent. Its calls are made in the agent's own graph, which may have another name.
            node = _node(GraphRun(node, "chain", subgraph.name, node.space, None), prebuilt_node)
        yield role_of(node), name


def _node(run: GraphRun, name: str) -> GraphRun:
    return GraphRun(run, "node", name, f"{run.space}|{name}", None)


def _from_namespace(space: str, agent: str | None, with_innermost: bool = True) -> GraphRun | None:
    """The runs of the nodes around a call, read from its namespace; returns the innermost one, or None without any.

    This is for applications that replace LangGraph's callbacks, which otherwise report the runs. A namespace names the
    nodes from the outside in, such as `plan:ID|write:ID`. If a node runs graphs in parallel, the number of the graph
    follows it. `with_innermost=False` leaves out the last part. `agent` is the agent's name in the metadata.
    """
    parts = space.split("|") if space else []
    n_parts = len(parts) if with_innermost else len(parts) - 1
    run: GraphRun | None = None
    for position, part in enumerate(parts[:n_parts]):
        if part.isdigit():
            continue  # the number of a parallel graph, not a node
        node_name = part.partition(":")[0]
        node_space = "|".join(parts[: position + 1])
        run = GraphRun(run, "node", node_name, node_space, agent)
    return run
