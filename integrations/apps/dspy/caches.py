"""DSPy's cache of answers, in memory and on disk: left aside where policies answer."""

from __future__ import annotations

from dspy.clients.cache import Cache

from cotune.integrations.apps.patching import each_subclass, replace_method, unless_left_aside


def install() -> None:
    """Wrap the class of caches and those below it, those there are and those to come."""
    each_subclass(Cache, _wrap)


def _wrap(cls: type) -> None:
    for name in ("get", "put"):
        replace_method(cls, name, unless_left_aside)
