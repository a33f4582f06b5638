"""Roles by a function of the user's, for applications in which no framework names them; and roles that agents share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from cotune.errors import WorkflowError, error_text
from cotune.recording.call_records import CallerContext
from cotune.runtime.callers import Function, functions_around
from cotune.runtime.user_code import is_library
from cotune.user_objects import takes

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
    """What names roles: a function of one argument, or for `"caller"` the name of the innermost application function,
    for `"model"` the name of the requested model.

    None for None. Raises WorkflowError for anything else.
    """
    if given is None:
        return None
    if given in (CALLER, MODEL):
        return by_caller if given == CALLER else by_model
    remedy = 'Define it as: def roles(call): return "planner", or give "caller" or "model".'
    if not callable(given) or inspect.iscoroutinefunction(given):
        raise WorkflowError(f"roles = {given!r} is not a plain function.", remedy)
    if not takes(given, 1):
        raise WorkflowError(f"The roles function {_name(given)} does not take one argument.", remedy)
    return given  # type: ignore[no-any-return]


def by_caller(call: CallRequest) -> str | None:
    """The roles function of `roles = "caller"`."""
    return call.caller


def by_model(call: CallRequest) -> str | None:
    """The roles function of `roles = "model"`."""
    return call.model or None


def named(
    roles: RolesFunction,
    caller: CallerContext,
    body: Mapping[str, Any],
    modules: dict[str, str],
    warn: Callable[[str, str], None],
) -> CallerContext:
    """The context of a call under the role that `roles` gives it.

    `modules` are the modules of the callers by whom roles of the episode were named so far. Raises WorkflowError where
    the function fails.
    """
    if caller.given:
        return caller
    request = CallRequest(caller.role, body, sys._getframe(1))
    try:
        role = roles(request)
        if role is not None:
            _check(role)
    except Exception as error:
        what = f"The roles function {_name(roles)} failed for a call: {error_text(error)}."
        raise WorkflowError(what, "Return the name of a role, or None for the framework's.") from error
    if roles is by_caller:
        _warn_by_caller(request, modules, warn)
    if role is None:
        return caller
    caller.calls += 1
    return CallerContext(role, "roles", state=caller.state, read=caller.read, output=caller.output)


def _warn_by_caller(request: CallRequest, modules: dict[str, str], warn: Callable[[str, str], None]) -> None:
    """Warn where callers' names do not separate roles: where there is no function, or several share a name."""
    if not request.functions:
        warn("unidentified_call", f"No function of the application is around a call: its role is {request.role!r}.")
        return
    name, module = request.functions[0]
    first = modules.setdefault(name, module)
    if first != module:
        text = f"{first}.{name} and {module}.{name} are one role, {name!r}: tell them apart by a roles function."
        warn("ambiguous_role", text)


def _check(role: Any) -> None:
    if not isinstance(role, str) or not role.strip() or len(role) > LONGEST or not role.isprintable():
        raise ValueError(f"{role!r} is no role: a role is 1 to {LONGEST} printable characters")


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


UNKNOWN = "an asyncio task or a thread"
_LOOP = "asyncio.events"
_REMEDY = "Give each agent a name, or run it inside `with cotune.role(...)`; else one policy is trained for all."


def place_here() -> str:
    """File, line and function of the application that runs this; a task of its own does not know who started it."""
    frame = sys._getframe(1)
    while is_library(frame):
        if frame.f_back is None or frame.f_globals.get("__name__") == _LOOP:
            return UNKNOWN
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def warn_of_shared(
    caller: CallerContext, known: dict[str, tuple[object, str]], warn: Callable[[str, str], None]
) -> None:
    """Warn where another agent without a name has made calls of this role before; `known` are its first, by role."""
    if caller.nameless is None:
        return
    agent, place = caller.nameless
    first, there = known.setdefault(caller.role, caller.nameless)
    if first is not agent and (there != place or there == UNKNOWN):
        text = f"Two agents without a name share the role {caller.role!r}: that of {there}, and that of {place}."
        warn("shared_role", f"{text} {_REMEDY}")
    elif first is not agent:
        text = f"Agents without a name share the role {caller.role!r}, or one that is made anew: {there} runs them."
        warn("shared_role", f"{text} {_REMEDY}")
