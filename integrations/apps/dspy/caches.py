"""DSPy's cache of answers, in memory and on disk: left aside where policies answer or prompts are edited."""

from __future__ import annotations

from dspy.clients.cache import Cache

from cotune.integrations.apps.patching import replace_methods, unless_left_aside


def install() -> None:
    """Wrap the class of caches and those below it, those there are and those to come."""
    replace_methods(Cache, unless_left_aside, "get", "put")
