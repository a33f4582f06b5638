"""DSPy's cache of answers, in memory and on disk: left aside where policies answer."""

from __future__ import annotations

from typing import Any

from dspy.clients.cache import Cache

from cotune.integrations.patching import cache_left_aside, each_subclass, replace_method


def install() -> None:
    """Wrap the class of caches and those below it, those there are and those to come."""
    each_subclass(Cache, _wrap)


def _wrap(cls: type) -> None:
    for name in ("get", "put"):
        replace_method(cls, name, _aside)


def _aside(original: Any) -> Any:
    def use(self: Any, *args: Any, **options: Any) -> Any:
        return None if cache_left_aside() else original(self, *args, **options)

    return use
