"""CrewAI: finds the role of a call from the agent, task and flow method that are running around it.

The role is the agent's `role` as the application wrote it: before inputs are filled in, and stripped of white space.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cotune.recording.call_records import CallerContext
from cotune.recording.context import Scope, called_by, current_caller, entered, innermost
from cotune.records.ids import new_id

NAME = "crewai"


@dataclass(frozen=True)
class CrewState:
    """`call.state` for scorers."""

    agent: str
    """The agent's role with the inputs filled in; empty if no agent is at work."""
    task: str
    """Description of the task, with the inputs filled in."""
    expected_output: str
    inputs: Mapping[str, Any]
    """Inputs of the crew."""
    flow: Mapping[str, Any]
    """State of the innermost flow around the call, at the time of the call."""


@dataclass(eq=False, slots=True)
class CrewScope(Scope):
    """An agent, a task or a flow method at work."""

    role: str
    key: str
    """Id of its latest output."""
    agent: Any = None
    task: Any = None
    flow: Any = None
    outer: CrewScope | None = None
    reads: list[str] = field(default_factory=list)
    """Ids of outputs that its prompt contains."""

    def caller(self, output: str | None = None) -> CallerContext:
        """The caller of a call in this scope, with the ids of the outputs that the call reads.

        `output` is the id of the call's answer if the call is the agent's own, not one of a tool or a guardrail.
        """
        outputs_read: list[str] = []
        # The agent around this scope, which has delegated its task or uses a tool.
        if self.outer is not None and self.outer.agent is not None:
            outputs_read.append(self.outer.key)
        # Outputs of other tasks are in the agent's own prompt only.
        is_own_call = output is not None
        if is_own_call:
            outputs_read += self.reads
        outputs_read.append(self.key)
        return CallerContext(self.role, NAME, state=_scope_state(self), read=tuple(outputs_read), output=output)


_templates: dict[int, str] = {}
"""id(agent) -> role as written, for agents that were copied after inputs had been filled in."""


def role_of(agent: Any) -> str:
    """An agent's role as the application wrote it: the template if it has one."""
    written = _templates.get(id(agent)) or getattr(agent, "_original_role", None) or getattr(agent, "role", None)
    return str(written or "").strip() or type(agent).__name__


def remember_template(original: Any, copied: Any) -> None:
    """Keep the role as written for a copy of an agent whose inputs were filled in."""
    written = _templates.get(id(original)) or getattr(original, "_original_role", None)
    if written and written != getattr(copied, "role", None):
        _templates[id(copied)] = written
        weakref.finalize(copied, _templates.pop, id(copied), None)


def agent_scope(agent: Any, task: Any = None) -> CrewScope:
    """The scope of an agent that starts to work, on a task of a crew or on its own."""
    outer = innermost(CrewScope)
    if outer is not None and task is not None and outer.task is task:
        # The scope of the task: the agent takes its place.
        return replace(outer, role=role_of(agent), agent=agent)
    return CrewScope(
        role_of(agent),
        _task_key(task),
        agent=agent,
        task=task,
        flow=None if outer is None else outer.flow,
        outer=outer,
        reads=_context_keys(agent, task),
    )


def flow_scope(flow: Any, method: str) -> CrewScope:
    """The scope of a flow's method, which is the role of calls without an agent."""
    return CrewScope(method, _task_key(None), flow=flow, outer=innermost(CrewScope))


def part_scope(name: str, *, inside: bool) -> CrewScope:
    """The scope of CrewAI's own use of a model, such as a guardrail. With `inside`, its role is part of the agent's."""
    outer = innermost(CrewScope)
    if outer is None:
        return CrewScope(name, _task_key(None))
    role = f"{outer.role}/{name}" if inside else name
    return replace(outer, role=role)


@contextmanager
def enter_scope(scope: CrewScope) -> Iterator[None]:
    """Run the block in `scope`, outside of any model's `call`. Afterwards the output of the scope counts as read by the
    agent around it, whose later calls may contain it.
    """
    try:
        with entered(scope), outside_call():
            yield
    finally:
        if scope.outer is not None and scope.outer.agent is not None:
            scope.outer.reads.append(scope.key)


@contextmanager
def outside_call() -> Iterator[None]:
    """Stay in the scope, but leave the model's `call`. For tools that a model class runs itself."""
    with called_by(None):
        yield


def calling_model() -> Any:
    """The model whose `call` is running here, or None. Calls that it makes inside are part of its own call."""
    caller = current_caller.get()
    return None if caller is None or caller.done else caller.model


def caller_of(agent: Any, task: Any) -> CallerContext | None:
    """The caller of a call that names an agent, directly or by its task; None for any other call."""
    if agent is None:
        agent = getattr(task, "agent", None)
    if agent is None:
        return None
    scope = innermost(CrewScope)
    if scope is None or scope.agent is not agent or scope.role != role_of(agent):
        scope = agent_scope(agent, task)
    return scope.caller(output=scope.key)


@contextmanager
def last_answer() -> Iterator[None]:
    """Give a call in the block to the agent at work, as the agent's answer. CrewAI does not name the agent in the call
    that asks for a final answer.
    """
    scope = innermost(CrewScope)
    if scope is None or scope.agent is None:
        yield
        return
    with called_by(scope.caller(output=scope.key)):
        yield


def _scope_state(scope: CrewScope) -> CrewState:
    """The state of a call for scorers, from the agent, task and flow of its scope."""
    crew = getattr(scope.agent, "crew", None)
    return CrewState(
        agent=str(getattr(scope.agent, "role", None) or "").strip(),
        task=str(getattr(scope.task, "description", None) or ""),
        expected_output=str(getattr(scope.task, "expected_output", None) or ""),
        inputs=dict(getattr(crew, "_inputs", None) or {}),
        flow=dict(getattr(scope.flow, "_state", None) or {}),
    )


def _task_key(task: Any) -> str:
    return f"crewai:{task.id}" if getattr(task, "id", None) is not None else f"crewai:{new_id()}"


def _context_keys(agent: Any, task: Any) -> list[str]:
    """Keys of the tasks whose outputs a task reads: its `context`, or by default all finished tasks before it."""
    if task is None:
        return []
    context = getattr(task, "context", None)
    if isinstance(context, list | tuple):
        return [_task_key(other) for other in context]
    if context is None:
        return []
    # A task without a context has a marker object there: it reads all finished tasks before it.
    crew = getattr(agent, "crew", None)
    finished_keys: list[str] = []
    for other in getattr(crew, "tasks", None) or ():
        if other is task:
            return finished_keys
        if other.output is not None:
            finished_keys.append(_task_key(other))
    return []  # the task is not one of the crew
