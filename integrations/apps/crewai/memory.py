"""Gives calls of CrewAI's memory, which asks a model itself, a role of their own: they are no agent's turn."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from crewai.memory.unified_memory import Memory

from cotune.integrations.apps.crewai.scopes import enter_scope, part_scope
from cotune.integrations.apps.patching import run_inside
from cotune.integrations.versions import require_hooks

_METHODS = ("remember", "remember_many", "extract_memories", "recall")
"""Methods that ask a model. The asynchronous methods call these in a thread."""


def install() -> None:
    """Wrap the methods of CrewAI's memory that ask a model, so that their calls get the role `memory`."""
    require_hooks("crewai", Memory, *_METHODS)

    def enter_memory_role(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return enter_scope(part_scope("memory", inside=False))

    for name in _METHODS:
        setattr(Memory, name, run_inside(vars(Memory)[name], enter_memory_role))
