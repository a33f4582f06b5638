"""CrewAI's memory asks a model itself: that is no agent's turn."""

from __future__ import annotations

from crewai.memory.unified_memory import Memory

from cotune.integrations.apps.crewai.scopes import at_work, part_scope
from cotune.integrations.apps.patching import run_inside
from cotune.integrations.versions import require_hooks

_METHODS = ("remember", "remember_many", "extract_memories", "recall")
"""The asynchronous ones call these in a thread."""


def install() -> None:
    """Give calls of the memory the role `memory`."""
    require_hooks("crewai", Memory, *_METHODS)
    for name in _METHODS:
        asked = run_inside(vars(Memory)[name], lambda *args, **kwargs: at_work(part_scope("memory", inside=False)))
        type.__setattr__(Memory, name, asked)
