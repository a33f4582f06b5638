"""The recording context: the only global state of cotune. Which episode runs here, and who is calling."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from cotune.recording.recorder import LiveCall, LiveEpisode


class CallerContext(msgspec.Struct):
    """Who is about to make an LLM call. `state` is what scorers see as `call.state`.

    A framework may end a mark in a copied context, where a reset would be lost; so `done` is a flag on the
    shared object.
    """

    role: str
    integration: str
    state: Any = None
    read: tuple[str, ...] = ()
    """Ids that name earlier outputs this call reads (LangChain message ids); resolved to parent calls."""
    output: str | None = None
    """Id under which the framework will know this call's output."""
    scope_id: Hashable = None
    """What the enclosing scope is that names this mark, where it is one: two marks of the same scope have the same."""
    given: bool = False
    """Whether the application itself names the role (`role`, the gateway's header): nothing overrules it."""
    done: bool = False
    calls: int = 0
    """Calls that were made under this mark."""


current_episode: ContextVar[LiveEpisode | None] = ContextVar("cotune_episode", default=None)
current_mark: ContextVar[CallerContext | None] = ContextVar("cotune_mark", default=None)
opened_call: ContextVar[LiveCall | None] = ContextVar("cotune_call", default=None)
"""A call that a model class has opened; the wire request it makes, if any, belongs to that call."""
_override: ContextVar[str | None] = ContextVar("cotune_role", default=None)

scopes: list[Callable[[], CallerContext | None]] = []
"""Integrations add a function that names the enclosing scope (a graph node, a flow step) where no mark is set."""
_asking: ContextVar[bool] = ContextVar("cotune_asking", default=False)


def scope_ids_around(scope: Callable[[], CallerContext | None]) -> list[Hashable]:
    """Units of the scopes of other frameworks around this point; none for a scope that is asked while another asks."""
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


def identify() -> CallerContext:
    """Explicit override first, then the newest live mark, then the enclosing scope, then the role `app`."""
    mark = current_mark.get()
    if mark is None or mark.done:
        mark = _scope_around() or CallerContext("app", "openai")
    name = _override.get()
    if name is None:
        return mark
    mark.calls += 1
    return CallerContext(name, "override", state=mark.state, read=mark.read, output=mark.output, given=True)


def _scope_around() -> CallerContext | None:
    """A fault of an integration costs the call its role, never the application the call."""
    try:
        return next((found for scope in scopes if (found := scope()) is not None), None)
    except Exception as error:  # noqa: BLE001
        episode = current_episode.get()
        if episode is not None:
            episode.warn("unidentified_call", "The role of a call could not be found, it is recorded as app.", error)
        return None
