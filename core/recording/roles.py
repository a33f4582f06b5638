"""Roles named by the user's function, for applications without a framework that names them; and roles that agents
share."""

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

CALLER = "caller"
MODEL = "model"
LONGEST = 200
"""Maximum length of a role's name, in characters."""


class CallRequest:
    """A call that is about to be made, for a roles function: a chat request, for every interface.

    `role` is the name from the framework around the call, `app` without a framework. `params` are the other parameters.
    """

    __slots__ = ("_frame", "_functions", "messages", "model", "params", "role", "tools")

    def __init__(self, role: str, body: Mapping[str, Any], frame: FrameType | None = None) -> None:
        """`frame` is the frame that makes the call."""
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

        In a task or thread that a library started, the innermost function that started it; None without one.
        """
        return next(iter(self.callers), None)

    @property
    def callers(self) -> tuple[str, ...]:
        """The functions of the application around the call, innermost first."""
        return tuple(name for name, _ in self.functions)

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions of the application around the call, each with the name of its module."""
        if self._functions is None:
            self._functions = functions_around(self._frame)
            self._frame = None
        return self._functions


RolesFunction = Callable[[CallRequest], str | None]
"""Names the role of a call. With None, the call keeps the role from the framework."""


def roles_function(roles: Any) -> RolesFunction | None:
    """The roles function for the setting `roles`.

    A function is returned as it is. `"caller"` stands for a function that names a role after the application's function
    that makes the call, `"model"` for one that names it after the requested model. None for None. Raises WorkflowError
    for anything else.
    """
    if roles is None:
        return None
    if roles == CALLER:
        return by_caller
    if roles == MODEL:
        return by_model
    remedy = 'Define it as: def roles(call): return "planner", or give "caller" or "model".'
    if not callable(roles) or inspect.iscoroutinefunction(roles):
        raise WorkflowError(f"roles = {roles!r} is not a plain function.", remedy)
    if not takes(roles, 1):
        raise WorkflowError(f"The roles function {_name(roles)} does not take one argument.", remedy)
    return roles  # type: ignore[no-any-return]


def by_caller(call: CallRequest) -> str | None:
    """The roles function of `roles = "caller"`."""
    return call.caller


def by_model(call: CallRequest) -> str | None:
    """The roles function of `roles = "model"`."""
    return call.model or None


def context_of_role(
    roles: RolesFunction,
    caller: CallerContext,
    body: Mapping[str, Any],
    modules: dict[str, str],
    warn: Callable[[str, str], None],
) -> CallerContext:
    """The caller of a call, with the role that the user's roles function `roles` returns for the request `body`.

    `modules` holds the module of each function that has named a role of the episode, to notice equal names. Raises
    WorkflowError if the roles function fails.
    """
    if caller.given:  # the application has named the role in another way, which nothing overrides
        return caller
    request = CallRequest(caller.role, body, sys._getframe(1))
    try:
        role = roles(request)
        if role is not None:
            _check(role)
    except Exception as error:
        cause = f"The roles function {_name(roles)} failed for a call: {error_text(error)}."
        raise WorkflowError(cause, "Return the name of a role, or None for the framework's.") from error
    if roles is by_caller:
        _warn_by_caller(request, modules, warn)
    if role is None:
        return caller
    caller.calls += 1  # the call is counted in the new context, and here in the context that it replaces
    return CallerContext(role, "roles", state=caller.state, read=caller.read, output=caller.output)


def _warn_by_caller(request: CallRequest, modules: dict[str, str], warn: Callable[[str, str], None]) -> None:
    """Warn if the names of functions do not separate roles (`roles = "caller"`): no function of the application makes
    the call, or functions of two modules have the same name. `modules` has the first module of each name."""
    if not request.functions:
        warn("unidentified_call", f"No function of the application is around a call: its role is {request.role!r}.")
        return
    name, module = request.functions[0]
    first_module = modules.setdefault(name, module)
    if first_module != module:
        functions = f"{first_module}.{name} and {module}.{name}"
        warn("ambiguous_role", f"{functions} are one role, {name!r}: tell them apart by a roles function.")


def _check(role: Any) -> None:
    if not isinstance(role, str) or not role.strip() or len(role) > LONGEST or not role.isprintable():
        raise ValueError(f"{role!r} is not a role: a role has 1 to {LONGEST} printable characters")


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


UNKNOWN = "an asyncio task or a thread"
_LOOP = "asyncio.events"
_REMEDY = "Give each agent a name, or run it inside `with cotune.role(...)`; else one policy is trained for all."


def place_here() -> str:
    """File, line and function of the innermost code of the application on the stack. `UNKNOWN` in a task or thread that
    a library started: the application's code is then on another stack."""
    frame = sys._getframe(1)
    while is_library(frame):
        is_outermost_in_task = frame.f_globals.get("__name__") == _LOOP
        if frame.f_back is None or is_outermost_in_task:
            return UNKNOWN
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def warn_of_shared(
    caller: CallerContext, first_agents: dict[str, tuple[object, str]], warn: Callable[[str, str], None]
) -> None:
    """Warn if the call of an agent without a name has the same role as another agent without a name. They would be
    trained as one.

    `caller` makes the call. `first_agents` holds the first of these agents of each role in the episode, with the line
    of the application that runs it. The agent of `caller` is added.
    """
    if caller.nameless is None:  # the agent has a name
        return
    agent, line = caller.nameless
    first_agent, first_line = first_agents.setdefault(caller.role, caller.nameless)
    if first_agent is agent:
        return
    are_in_two_places = first_line != line or first_line == UNKNOWN
    if are_in_two_places:
        text = f"Two agents without a name share the role {caller.role!r}: one in {first_line}, one in {line}."
    else:  # one line may run several agents in turn, or create the same agent again
        text = (
            f"Several agents without a name share the role {caller.role!r}, or one agent is created again for each "
            f"run: {first_line} runs them."
        )
    warn("shared_role", f"{text} {_REMEDY}")
