"""Roles by a function of the user's, for applications in which no framework names them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from cotune.context import CallerContext
from cotune.errors import WorkflowError
from cotune.runtime.callers import Function, follow_tasks, functions_around

if TYPE_CHECKING:
    from cotune.recording.recorder import LiveEpisode

CALLER, MODEL = "caller", "model"
LONGEST = 200
"""Most characters of a role's name."""


class CallRequest:
    """A call that is about to be made, as a roles function sees it: a chat request, whatever interface it came by.

    `role` is the name that the framework around it gives, `app` outside any; `params` are its other parameters.
    """

    __slots__ = ("_frame", "_functions", "messages", "model", "params", "role", "tools")

    def __init__(self, role: str, body: Mapping[str, Any], frame: FrameType | None = None) -> None:
        """`frame` is where the call is made."""
        self._frame = frame
        self.role = role
        self.params = dict(body)
        self.messages: list[dict[str, Any]] = list(self.params.pop("messages", None) or [])
        self.tools: list[dict[str, Any]] = list(self.params.pop("tools", None) or [])
        self.model = str(self.params.pop("model", ""))
        self._functions: tuple[Function, ...] | None = None

    @property
    def caller(self) -> str | None:
        """Qualified name (`Planner.plan`) of the innermost function of the application's own code that makes the call.

        In a task or thread that a library started, the innermost that started it; None where there is none.
        """
        return next(iter(self.callers), None)

    @property
    def callers(self) -> tuple[str, ...]:
        """The functions of the application around the call, innermost first."""
        return tuple(name for name, _ in self.functions)

    @property
    def functions(self) -> tuple[Function, ...]:
        """The same, each with its module's name."""
        if self._functions is None:
            self._functions = functions_around(self._frame)
            self._frame = None
        return self._functions


RolesFunction = Callable[[CallRequest], str | None]
"""Names the role of a call; None leaves it the one that the framework gives."""


def roles_function(given: Any) -> RolesFunction | None:
    """What names roles: a function of one argument, or for `"caller"` the innermost application function's name, for
    `"model"` the model's that is asked for.

    None for None. Raises WorkflowError for anything else.
    """
    if given is None:
        return None
    follow_tasks()
    if given in (CALLER, MODEL):
        return by_caller if given == CALLER else by_model
    remedy = 'Define it as: def roles(call): return "planner", or give "caller" or "model".'
    if not callable(given) or inspect.iscoroutinefunction(given):
        raise WorkflowError(f"roles = {given!r} is not a plain function.", remedy)
    try:
        inspect.signature(given).bind(None)
    except TypeError:
        raise WorkflowError(f"The roles function {_name(given)} does not take one argument.", remedy) from None
    except ValueError:
        pass
    return given  # type: ignore[no-any-return]


def by_caller(call: CallRequest) -> str | None:
    """The roles function of `roles = "caller"`."""
    return call.caller


def by_model(call: CallRequest) -> str | None:
    """The roles function of `roles = "model"`."""
    return call.model or None


def named(roles: RolesFunction, mark: CallerContext, body: Mapping[str, Any], episode: LiveEpisode) -> CallerContext:
    """The mark of a call under the role that `roles` gives it.

    A fault of the function fails the episode, not the call: the application has its answer, under the old role.
    """
    if mark.given:
        return mark
    request = CallRequest(mark.role, body, sys._getframe(1))
    try:
        role = roles(request)
        if role is not None:
            _check(role)
    except Exception as error:  # noqa: BLE001
        what = f"The roles function {_name(roles)} failed for a call: {type(error).__name__}: {error}."
        if episode.fatal is None:
            episode.fatal = WorkflowError(what, "Return the name of a role, or None for the framework's.")
            episode.fatal.__cause__ = error
        episode.warn("unidentified_call", f"A call keeps the role {mark.role!r}: the roles function failed.", error)
        return mark
    if roles is by_caller:
        _warn_by_caller(request, episode)
    if role is None:
        return mark
    mark.calls += 1
    return CallerContext(role, "roles", state=mark.state, read=mark.read, output=mark.output)


def _warn_by_caller(request: CallRequest, episode: LiveEpisode) -> None:
    """Say where the caller's name does not tell roles apart: no function is there, or several share the name."""
    if not request.functions:
        text = f"No function of the application is around a call: its role is {request.role!r}."
        episode.warn("unidentified_call", text)
        return
    name, module = request.functions[0]
    first = episode.notes.setdefault("callers", {}).setdefault(name, module)
    if first != module:
        text = f"{first}.{name} and {module}.{name} are one role, {name!r}: tell them apart by a roles function."
        episode.warn("ambiguous_role", text)


def _check(role: Any) -> None:
    if not isinstance(role, str) or not role.strip() or len(role) > LONGEST or not role.isprintable():
        raise ValueError(f"{role!r} is no role: a role is 1 to {LONGEST} printable characters")


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)
