"""The nodes of a graph, with the roles that their calls would have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cotune.integrations.langgraph.runs import GraphRun, is_own_node, role_of


def nodes_of(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    """Role and name of each node of a graph whose run is `run`, and of the graphs that are nodes or are known to be
    called in one. Those that prebuilt agents bring along are no parts of the application."""
    yield from _nodes(graph, run)
    for space, inner in graph.get_subgraphs(recurse=True):
        outer: GraphRun = run
        for name in space.split("|"):
            outer = _node(outer, name)
        yield from _nodes(inner, GraphRun(outer, "chain", inner.name, outer.space, None))


def _nodes(graph: Any, run: GraphRun) -> Iterator[tuple[str, str]]:
    for name in getattr(graph, "nodes", ()):
        if is_own_node(name):
            yield role_of(_node(run, name)), name


def _node(run: GraphRun, name: str) -> GraphRun:
    return GraphRun(run, "node", name, f"{run.space}|{name}", None)
