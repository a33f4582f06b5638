"""Functions that integrations add for core to call, as core does not import integrations."""

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
        """No functions yet: integrations add theirs."""
        self.activators: list[Callable[[], None]] = []
        """Run before every episode, so they must be quick. They install the integrations."""
        self.starters: list[Callable[[], None]] = []
        """Run before every episode of a workflow that cotune runs itself, so they must be quick. They keep frameworks
        from asking the user."""
        self.freezers: list[Callable[[], None]] = []
        """Run before a frozen episode, so they must be quick. They hook clock, uuid and random."""
        self.runners: list[Callable[[object], GraphRunner | None]] = []
        """Each returns a function that runs an application object, or None."""
        self.scope_finders: list[Callable[[], CallerContext | None]] = []
        """Each finds a scope that `context.entered` does not enter, for example the node of a graph."""


hooks = Hooks()
