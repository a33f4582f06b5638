"""Where integrations, which core does not import, add what core calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from cotune.recording.call_records import CallerContext
from cotune.runtime.process_state import ProcessState

GraphRunner = Callable[[Any], Awaitable[Any]]
"""Runs an application object on an input."""


class Hooks(ProcessState):
    """Functions that integrations have added."""

    def __init__(self) -> None:
        self.activators: list[Callable[[], None]] = []
        """Run before every episode, cheaply: they install the integrations."""
        self.starters: list[Callable[[], None]] = []
        """Run before every episode of a workflow that cotune runs itself, cheaply: they keep frameworks from asking the
        user."""
        self.freezers: list[Callable[[], None]] = []
        """Run before an episode that is frozen, cheaply: they hook clock, uuid and random."""
        self.runners: list[Callable[[object], GraphRunner | None]] = []
        """Each returns how to run an application object, or None."""
        self.scope_finders: list[Callable[[], CallerContext | None]] = []
        """Each finds a scope that `context.entered` does not enter, for example the node of a graph."""


hooks = Hooks()
