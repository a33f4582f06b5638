"""The recording context: the only global state of cotune. Which episode runs here, and who is calling."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from cotune.recording.pending_call import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.runtime.context_vars import setting

ScopeT = TypeVar("ScopeT", bound="Scope")

current_episode: ContextVar[LiveEpisode | None] = ContextVar("cotune_episode", default=None)
current_caller: ContextVar[CallerContext | None] = ContextVar("cotune_caller", default=None)
opened_call: ContextVar[LiveCall | None] = ContextVar("cotune_call", default=None)
"""A call that a model class has opened; the wire request it makes, if any, belongs to that call."""
judging: ContextVar[LiveEpisode | None] = ContextVar("cotune_judging", default=None)
"""Episode of the calls that a judge of whole episodes makes, where it is a role of the run."""
_override: ContextVar[str | None] = ContextVar("cotune_role", default=None)

current_scope: ContextVar[Scope | None] = ContextVar("cotune_scope", default=None)
scope_finders: list[Callable[[], CallerContext | None]] = []
"""How integrations find a scope that nothing enters here, such as the node of a graph."""


@dataclass(eq=False, slots=True)
class Scope:
    """An agent, a team, a task or a tool at work: it makes the calls within it that no framework announces.

    Integrations subclass it.
    """

    around: Scope | None = field(default_factory=current_scope.get, init=False)
    """The scope that was current when this one was made, of whatever framework."""
    found: Hashable = field(default_factory=lambda: getattr(_found_scope(), "scope_id", None), init=False)
    """Id of the scope that was found then."""

    def caller(self) -> CallerContext:
        """Who makes a call that is made in this scope."""
        raise NotImplementedError


def innermost(kind: type[ScopeT]) -> ScopeT | None:
    """The innermost scope of one kind around this point."""
    scope = current_scope.get()
    while scope is not None and not isinstance(scope, kind):
        scope = scope.around
    return scope


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Calls made inside are made in `scope`, and are no part of a call that goes on around it."""
    with setting(current_scope, scope), called_by(None):
        yield


@contextmanager
def called_by(caller: CallerContext | None) -> Iterator[None]:
    """Calls made inside are `caller`'s, or without one the enclosing scope's; none is part of a call around it."""
    with setting(current_caller, caller), setting(opened_call, None):
        yield


@contextmanager
def role(name: str) -> Iterator[None]:
    """Attribute every call made inside to the role `name`, whatever framework makes it.

    ```python
    with cotune.role("planner"):
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    ```
    """
    with setting(_override, name):
        yield


def recording(episode: LiveEpisode) -> AbstractContextManager[None]:
    """Calls made inside belong to `episode`."""
    return setting(current_episode, episode)


def identify() -> CallerContext:
    """Explicit override first, then the newest caller that is not done, then the enclosing scope, then `app`."""
    caller = current_caller.get()
    if caller is None or caller.done:
        caller = _enclosing() or CallerContext("app", "openai")
    name = _override.get()
    if name is None:
        return caller
    caller.calls += 1
    return CallerContext(
        name,
        "override",
        state=caller.state,
        read=caller.read,
        output=caller.output,
        given=True,
        thread=caller.thread,
    )


def _enclosing() -> CallerContext | None:
    """Of the current scope and of what is found, the inner one: what was found already when the scope was made is
    around it. A fault of an integration costs the call its role, never the application the call."""
    found, scope = _found_scope(), current_scope.get()
    if scope is None or (found is not None and found.scope_id != scope.found):
        return found
    try:
        return scope.caller()
    except Exception as error:  # noqa: BLE001
        _count_unidentified(error)
        return None


def _found_scope() -> CallerContext | None:
    try:
        return next((found for find in scope_finders if (found := find()) is not None), None)
    except Exception as error:  # noqa: BLE001
        _count_unidentified(error)
        return None


def _count_unidentified(error: Exception) -> None:
    episode = current_episode.get()
    if episode is not None:
        episode.warn("unidentified_call", "The role of a call could not be found, it is recorded as app.", error)
