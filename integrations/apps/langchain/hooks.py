"""Hooks the caches, tools and middleware of LangChain.

Policies answer without caches. Results of tools are recorded. A model that middleware calls, around an agent's own call
or around a tool, has the middleware's role.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from cotune.integrations.apps.patching import (
    bypasses_cache,
    each_subclass,
    record_tools,
    replace_method,
    replace_methods,
    run_inside,
    unless_bypassed,
)
from cotune.integrations.versions import require_hooks
from cotune.runtime.user_code import context_value

_WRAPPERS = ("wrap_model_call", "awrap_model_call", "wrap_tool_call", "awrap_tool_call")


@dataclass(frozen=True, eq=False, slots=True)
class MiddlewareCall:
    """One call of a middleware around something; runs started within it belong to it by this object's identity."""

    name: str


class Around(NamedTuple):
    """The code of LangChain and LangGraph around this point that their callbacks do not report."""

    middleware: MiddlewareCall | None = None
    """The middleware that is running here; None while the code that it wraps runs."""
    starting_graph: Any = None
    """The graph whose run is about to start; taken by the first run that does."""


around: ContextVar[Around] = ContextVar("cotune_langchain", default=Around())  # noqa: B039  # a tuple


def install_caches() -> None:
    """Wrap all classes of caches, present and future."""
    from langchain_core.caches import BaseCache

    replace_methods(BaseCache, unless_bypassed, "lookup", "update")
    replace_methods(BaseCache, _unless_bypassed_async, "alookup", "aupdate")


def _unless_bypassed_async(original: Any) -> Any:
    async def use(self: Any, *args: Any, **options: Any) -> Any:
        return None if bypasses_cache() else await original(self, *args, **options)

    return use


def install_tools() -> None:
    """Record the results of tools of all classes, present and future."""
    from langchain_core.tools.base import BaseTool

    record_tools(BaseTool, "_run", "_arun", without=("config", "run_manager", "callbacks", "runtime"))


def install_middleware() -> None:
    """Wrap all middleware classes, present and future. Agents that were composed before are not affected."""
    from langchain.agents.middleware.types import AgentMiddleware

    require_hooks("langchain", AgentMiddleware, *_WRAPPERS)
    each_subclass(AgentMiddleware, lambda cls: None if cls is AgentMiddleware else _wrap(cls))


def _wrap(cls: type) -> None:
    for name in _WRAPPERS:
        replace_method(cls, name, _wrap_method)


def _wrap_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `wrap_model_call` or a similar method of a middleware, so that each model call gets the right role.

    Models that the method calls itself have the middleware's role. Its argument `handler` runs the agent's own model or
    tool, whose calls keep the role that they would have without the middleware.
    """
    run_in_middleware = run_inside(original, lambda self, *args: _in_middleware(MiddlewareCall(self.name)))

    def wrapper(self: Any, request: Any, handler: Callable[..., Any]) -> Any:
        outer_middleware = around.get().middleware
        run_handler_outside = run_inside(handler, lambda *args, **kwargs: _in_middleware(outer_middleware))
        return run_in_middleware(self, request, run_handler_outside)

    return wrapper


def _in_middleware(middleware: MiddlewareCall | None) -> AbstractContextManager[None]:
    return context_value(around, around.get()._replace(middleware=middleware))
