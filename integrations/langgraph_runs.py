"""Names a role from a tree of LangGraph runs. A pure function of what the callbacks told, without the framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_PREBUILT = frozenset({"agent", "model", "tools", "generate_structured_response"})
_HOOKS = frozenset({"pre_model_hook", "post_model_hook"})
_MIDDLEWARE = (".before_agent", ".before_model", ".after_model", ".after_agent")
_UNNAMED = "LangGraph"
"""What LangGraph calls a graph without a name."""


@dataclass(slots=True)
class Run:
    """A run in progress. `space` is the namespace of the node execution it belongs to; `agent` the agent name that the
    metadata claims, which is inherited and so may belong to an outer graph."""

    parent: Run | None
    kind: Literal["chain", "node", "tool", "model"]
    name: str
    space: str
    agent: str | None
    source: str | None = None
    own_state: Any = None

    @classmethod
    def chain(cls, parent: Run | None, name: str | None, metadata: Mapping[str, Any], inputs: Any) -> Run:
        """A node when it is the first run in its namespace, else a graph or any other runnable."""
        space, agent = _space(metadata), metadata.get("lc_agent_name")
        if not space:
            return cls(parent, "chain", name or "", "", agent)
        node = metadata.get("langgraph_node")
        if parent is None:
            parent = _from_namespace(space, agent, whole=name != node)
        if parent is None or parent.space != space:
            return cls(parent, "node", str(node or name), space, agent, None, inputs)
        return cls(parent, "chain", name or "", space, agent)

    @classmethod
    def tool(cls, parent: Run | None, name: str | None, metadata: Mapping[str, Any]) -> Run:
        space, agent = _space(metadata), metadata.get("lc_agent_name")
        return cls(parent or _from_namespace(space, agent), "tool", name or "tool", space, agent)

    @classmethod
    def model(cls, parent: Run | None, metadata: Mapping[str, Any]) -> Run:
        """A model call; where the node is the model itself, or the runs around it are unknown, metadata name them."""
        space, agent = _space(metadata), metadata.get("lc_agent_name")
        parent = parent or _from_namespace(space, agent)
        if space and parent is not None and parent.space != space:
            parent = cls(parent, "node", str(metadata.get("langgraph_node") or ""), space, agent)
        return cls(parent, "model", "", space, None, metadata.get("lc_source"))

    @property
    def state(self) -> Any:
        """Input of the innermost node around this run; None outside any graph."""
        run: Run | None = self
        while run is not None:
            if run.kind == "node":
                return run.own_state
            run = run.parent
        return None


def role_of(run: Run) -> str:
    """Role of a model call: names around it from the outside in, joined with `/`; `app` when there are none."""
    names: list[str] = []
    prebuilt = ""
    around: Run | None = run
    while around is not None:
        if around.kind == "tool":
            names.append(around.name)
        elif around.kind == "node":
            hidden = around.name in _PREBUILT
            prebuilt = prebuilt or (around.name if hidden else "")
            if not hidden:
                names.append(_trimmed(around.name))
            agent = _agent(around.parent, hidden or around.name in _HOOKS)
            if agent:
                names.append(agent)
                break
        around = around.parent
    if run.source and not (names and "Middleware" in names[0]):
        names.insert(0, run.source)
    if len(names) == 1:
        return names[0]
    return "/".join(reversed(names)) or prebuilt or "app"


def _agent(graph: Run | None, inside_agent: bool) -> str | None:
    """Name of the agent whose graph this is. A claimed name counts where it is the graph's own, not an outer one's."""
    if graph is None or graph.kind != "chain":
        return None
    outer = graph.parent.agent if graph.parent else None
    if graph.agent and (graph.agent == graph.name or graph.agent != outer):
        return graph.agent
    return graph.name if inside_agent and graph.name not in ("", _UNNAMED) else None


def _trimmed(node: str) -> str:
    return node.rpartition(".")[0] if node.endswith(_MIDDLEWARE) else node


def _space(metadata: Mapping[str, Any]) -> str:
    return metadata.get("langgraph_checkpoint_ns") or ""


def _from_namespace(space: str, agent: str | None, whole: bool = True) -> Run | None:
    """Nodes whose runs are unknown, because the application replaced its callbacks on the way; with the innermost node,
    or (not `whole`) without it. A namespace is `node:id|node:id`, with numbers for parallel graphs of one node."""
    parts = space.split("|") if space else []
    run: Run | None = None
    for end in range(1, len(parts) + whole):
        if not parts[end - 1].isdigit():
            run = Run(run, "node", parts[end - 1].partition(":")[0], "|".join(parts[:end]), agent)
    return run
