"""Middleware of LangChain's agents: models that it calls around an agent's own call, or around a tool."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from cotune.integrations.apps.patching import each_subclass, inside, replace_method
from cotune.integrations.versions import missing_hook
from cotune.runtime.context_vars import setting

_WRAPPERS = ("wrap_model_call", "awrap_model_call", "wrap_tool_call", "awrap_tool_call")


@dataclass(frozen=True, eq=False, slots=True)
class MiddlewareCall:
    """One call of a middleware around something; runs started within it belong to it by this object's identity."""

    name: str


current_middleware: ContextVar[MiddlewareCall | None] = ContextVar("cotune_middleware", default=None)
"""The middleware that is running here; not while what it is wrapped around runs."""


def install() -> None:
    """Wrap all middleware classes, those there are and those to come. Agents composed before are not reached."""
    from langchain.agents.middleware.types import AgentMiddleware

    for name in _WRAPPERS:
        if not hasattr(AgentMiddleware, name):
            raise missing_hook("langchain", f"AgentMiddleware.{name}")
    each_subclass(AgentMiddleware, lambda cls: None if cls is AgentMiddleware else _wrap(cls))


def _wrap(cls: type) -> None:
    for name in _WRAPPERS:
        replace_method(cls, name, _wrapped)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, in its middleware; the handler that it calls is in what was around it."""
    running = inside(original, lambda self, *args: setting(current_middleware, MiddlewareCall(self.name)))

    def wrapper(self: Any, request: Any, handler: Callable[..., Any]) -> Any:
        outer = current_middleware.get()
        return running(self, request, inside(handler, lambda *args, **kwargs: setting(current_middleware, outer)))

    return wrapper
