"""Gives calls of CrewAI's memory, which asks a model itself, a role of their own: they are no agent's turn."""

from __future__ import annotations

from crewai.memory.unified_memory import Memory

from cotune.integrations.apps.crewai.scopes import enter_scope, part_scope
from cotune.integrations.apps.patching import run_inside
from cotune.integrations.versions import require_hooks

_METHODS = ("remember", "remember_many", "extract_memories", "recall")
"""Methods that ask a model. The asynchronous methods call these in a thread."""


def install() -> None:
    """Give calls of the memory the role `memory`."""
    require_hooks("crewai", Memory, *_METHODS)
    for name in _METHODS:
        in_memory_role = run_inside(
            vars(Memory)[name], lambda *args, **kwargs: enter_scope(part_scope("memory", inside=False))
        )
        type.__setattr__(Memory, name, in_memory_role)
