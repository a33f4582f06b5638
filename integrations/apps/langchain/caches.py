"""LangChain's caches of answers: left aside where policies answer."""

from __future__ import annotations

from typing import Any

from langchain_core.caches import BaseCache

from cotune.integrations.apps.patching import cache_left_aside, each_subclass, replace_method, unless_left_aside


def install() -> None:
    """Wrap all classes of caches, those there are and those to come."""
    each_subclass(BaseCache, _wrap)


def _wrap(cls: type) -> None:
    for name in ("lookup", "update"):
        replace_method(cls, name, unless_left_aside)
    for name in ("alookup", "aupdate"):
        replace_method(cls, name, _aside_async)


def _aside_async(original: Any) -> Any:
    async def use(self: Any, *args: Any, **options: Any) -> Any:
        return None if cache_left_aside() else await original(self, *args, **options)

    return use
