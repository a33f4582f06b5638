"""DSPy's cache of answers, in memory and on disk: bypassed if policies answer or prompts are edited."""

from __future__ import annotations

from dspy.clients.cache import Cache

from cotune.integrations.apps.patching import replace_methods, unless_bypassed


def install() -> None:
    """Wrap the class of caches and its subclasses, present and future."""
    replace_methods(Cache, unless_bypassed, "get", "put")
