"""The recording context: the only global state of cotune. Which episode runs here, and who is calling."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cotune.recording.pending_call import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode

current_episode: ContextVar[LiveEpisode | None] = ContextVar("cotune_episode", default=None)
current_caller: ContextVar[CallerContext | None] = ContextVar("cotune_caller", default=None)
opened_call: ContextVar[LiveCall | None] = ContextVar("cotune_call", default=None)
"""A call that a model class has opened; the wire request it makes, if any, belongs to that call."""
_override: ContextVar[str | None] = ContextVar("cotune_role", default=None)

scopes: list[Callable[[], CallerContext | None]] = []
"""Integrations add a function that names the enclosing scope (a graph node, a flow step) where no caller is set."""
_asking: ContextVar[bool] = ContextVar("cotune_asking", default=False)


def scope_ids_around(scope: Callable[[], CallerContext | None]) -> list[Hashable]:
    """Ids of the scopes of other frameworks around this point; none inside such a search, as scopes search too."""
    if _asking.get():
        return []
    token = _asking.set(True)
    try:
        return [found.scope_id for other in scopes if other is not scope and (found := other()) is not None]
    finally:
        _asking.reset(token)


@contextmanager
def role(name: str) -> Iterator[None]:
    """Attribute every call made inside to the role `name`, whatever framework makes it."""
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


@contextmanager
def recording(episode: LiveEpisode) -> Iterator[None]:
    """Calls made inside belong to `episode`."""
    token = current_episode.set(episode)
    try:
        yield
    finally:
        current_episode.reset(token)


def identify() -> CallerContext:
    """Explicit override first, then the newest caller that is not done, then the enclosing scope, then `app`."""
    caller = current_caller.get()
    if caller is None or caller.done:
        caller = _scope_around() or CallerContext("app", "openai")
    name = _override.get()
    if name is None:
        return caller
    caller.calls += 1
    return CallerContext(name, "override", state=caller.state, read=caller.read, output=caller.output, given=True)


def _scope_around() -> CallerContext | None:
    """A fault of an integration costs the call its role, never the application the call."""
    try:
        return next((found for scope in scopes if (found := scope()) is not None), None)
    except Exception as error:  # noqa: BLE001
        episode = current_episode.get()
        if episode is not None:
            episode.warn("unidentified_call", "The role of a call could not be found, it is recorded as app.", error)
        return None
