"""The parts of an application (nodes, agents), as its frameworks name them: to find those that never call a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

PartKind = Literal["node", "member", "agent", "method", "agent type"]


class Part(msgspec.Struct, frozen=True):
    """A graph's node, a team's member, a crew's agent, a flow's method or a runtime's type of agents. Calls of the part
    have the role `role`."""

    role: str
    kind: PartKind
    of: str
    """Name of the graph, team, crew or flow."""
    name: str
    """The name of the part in prompts."""
    waits: str = ""
    """The setting that stops the graph before this node to wait for a person; empty without one."""


class Parts:
    """The parts of the graphs, teams, crews and flows that ran, and which of the parts began to work. Safe from any
    thread."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._entered: set[str] = set()
        self._words: dict[str, None] = {}

    def add(self, parts: Iterable[Part]) -> None:
        """Add the parts of a graph, team, crew or flow that runs. If two parts have the same role, the first stays."""
        for part in parts:
            self._parts.setdefault(part.role, part)

    def enter(self, role: str) -> None:
        """Note that a part begins to work."""
        self._entered.add(role)

    def add_words(self, words: Iterable[str]) -> None:
        """Add words that the application waits for in an answer, for example the words that end a team's chat."""
        self._words.update(dict.fromkeys(words))

    @property
    def known(self) -> list[Part]:
        return list(self._parts.values())

    @property
    def words(self) -> list[str]:
        return list(self._words)

    def ran(self, part: Part) -> bool:
        """Whether the part has begun to work, with or without a call."""
        return part.role in self._entered
