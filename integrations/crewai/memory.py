"""CrewAI's memory asks a model of its own accord: what it asks is no agent's turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from crewai.memory.unified_memory import Memory

from cotune.context import current_episode
from cotune.integrations.crewai.scopes import at_work, part_scope
from cotune.integrations.versions import missing_hook

_METHODS = ("remember", "remember_many", "extract_memories", "recall")
"""The asynchronous ones call these in a thread."""


def install() -> None:
    """Give what the memory asks the role `memory`."""
    for name in _METHODS:
        original = Memory.__dict__.get(name)
        if original is None:
            raise missing_hook("crewai", f"Memory.{name}")
        type.__setattr__(Memory, name, _as_memory(original))


def _as_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None:
            return original(self, *args, **kwargs)
        with at_work(part_scope("memory", inside=False)):
            return original(self, *args, **kwargs)

    return call
