"""The recording context, the only global state of cotune: the episode that runs here, and the caller."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple, TypeVar

from cotune.recording.call_records import CallerContext
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.recording.redaction import Redaction
from cotune.runtime.user_code import context_value

ScopeT = TypeVar("ScopeT", bound="Scope")


class Judging(NamedTuple):
    """How to record the calls and answers of a judge that works outside of an episode."""

    episode: LiveEpisode | None = None
    """The episode of the judge's calls, if the judge is a role of the run."""
    redaction: Redaction | None = None
    """Changes the judge's answers before they are stored."""


current_episode: ContextVar[LiveEpisode | None] = ContextVar("cotune_episode", default=None)
current_caller: ContextVar[CallerContext | None] = ContextVar("cotune_caller", default=None)
opened_call: ContextVar[LiveCall | None] = ContextVar("cotune_call", default=None)
"""A call that a model class has opened. The wire request that it sends, if any, belongs to this call."""
judging: ContextVar[Judging] = ContextVar("cotune_judging", default=Judging())  # noqa: B039  # a tuple
"""Set while judges and scorers work outside of an episode."""
role_override: ContextVar[RoleOverride | None] = ContextVar("cotune_role", default=None)
"""The innermost `cotune.role` around this point, except in generators."""
generator_roles: dict[int, list[RoleOverride]] = {}
"""The roles that generators have entered, innermost last, by the id of the generator's frame.

A generator shares the context of its consumer. A ContextVar that it sets would still be set while it is suspended, for
the calls of the consumer. So its roles apply only to calls that have the generator's frame on their stack.
"""

current_scope: ContextVar[Scope | None] = ContextVar("cotune_scope", default=None)


class RoleOverride(NamedTuple):
    """A role that the application has named with `cotune.role`."""

    name: str
    frame: FrameType
    """The frame that entered it. The reference keeps the frame's id from being used again."""
    entered_ns: int
    """When it was entered, by `time.perf_counter_ns`."""


@dataclass(eq=False, slots=True)
class Scope:
    """An agent, a team, a task or a tool at work. It is the caller of calls inside it that no framework announces.

    Integrations subclass it.
    """

    around: Scope | None = field(default_factory=current_scope.get, init=False)
    """The scope that was current when this one was created, of any framework."""
    scope_of_finders: Hashable = field(default_factory=lambda: getattr(_found_scope(), "scope_id", None), init=False)
    """Id of the scope that the scope finders returned when this one was created."""

    def caller(self) -> CallerContext:
        """The caller of calls in this scope."""
        raise NotImplementedError


def innermost(kind: type[ScopeT]) -> ScopeT | None:
    """The innermost scope of one kind around this point."""
    scope = current_scope.get()
    while scope is not None and not isinstance(scope, kind):
        scope = scope.around
    return scope


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Calls made inside belong to `scope`, and not to a call around it."""
    with context_value(current_scope, scope), called_by(None):
        yield


@contextmanager
def called_by(caller: CallerContext | None) -> Iterator[None]:
    """Calls made inside belong to `caller`, or without one to the enclosing scope, and not to a call around it."""
    with context_value(current_caller, caller), context_value(opened_call, None):
        yield


def recording(episode: LiveEpisode) -> AbstractContextManager[None]:
    """Calls made inside belong to `episode`."""
    return context_value(current_episode, episode)


def identify() -> CallerContext:
    """The caller of a call that is made at this point of the code.

    The first of these decides: a role that the application has set with `cotune.role`, the caller that a framework has
    announced and that is not done, and the enclosing scope (an agent, team, task or tool). Without any, the role is
    `app`.
    """
    caller = current_caller.get()
    if caller is None or caller.done:
        caller = _caller_of_enclosing_scope() or CallerContext("app", "openai")
    role_of_application = role_here(sys._getframe(1))
    if role_of_application is None:
        return caller
    # The call gets a new context with this role. The context that it replaces must count the call too.
    caller.calls += 1
    return CallerContext(
        role_of_application.name,
        "override",
        state=caller.state,
        read=caller.read,
        output=caller.output,
        given=True,  # no roles function may change the role
        thread=caller.thread,
    )


def role_here(frame: FrameType | None) -> RoleOverride | None:
    """The innermost block of `cotune.role` around a frame.

    Its role is in a ContextVar, or if the block is in a generator, in `generator_roles` under the generator's frame.
    """
    role_of_context = role_override.get()
    if not generator_roles:
        return role_of_context
    # Go outwards to the first frame that has entered a role.
    while frame is not None:
        is_of_context = role_of_context is not None and role_of_context.frame is frame
        roles_of_generator = generator_roles.get(id(frame))
        if roles_of_generator:
            innermost_role = roles_of_generator[-1]
            # A generator's code may also set the ContextVar: then the role that was entered later is inside the other.
            if role_of_context is not None and is_of_context and role_of_context.entered_ns > innermost_role.entered_ns:
                return role_of_context
            return innermost_role
        if is_of_context:
            return role_of_context
        frame = frame.f_back
    return role_of_context


def _caller_of_enclosing_scope() -> CallerContext | None:
    """The caller of the innermost scope around this point: of `current_scope`, or of a scope that a scope finder of an
    integration names, for example the node of a graph. None without a scope.

    If an integration fails, the call loses its role, but the application still gets its answer.
    """
    # There are two kinds of scopes. Which one is the innermost? Example: a graph's node (found) runs a crew (entered).
    caller_of_found_scope = _found_scope()
    scope = current_scope.get()
    if scope is None:
        return caller_of_found_scope
    if caller_of_found_scope is not None and caller_of_found_scope.scope_id != scope.scope_of_finders:
        # The found scope was entered after the current scope was created: it is the inner one.
        return caller_of_found_scope
    try:
        return scope.caller()
    except Exception as error:  # noqa: BLE001
        _count_unidentified(error)
        return None


def _found_scope() -> CallerContext | None:
    """The caller that the first successful scope finder names, for example the node of a graph; None without one."""
    try:
        for find in hooks.scope_finders:
            caller = find()
            if caller is not None:
                return caller
    except Exception as error:  # noqa: BLE001
        _count_unidentified(error)
    return None


def _count_unidentified(error: Exception) -> None:
    episode = current_episode.get()
    if episode is not None:
        episode.warn("unidentified_call", "The role of a call could not be found, it is recorded as app.", error)
