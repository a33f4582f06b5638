"""CrewAI: who makes a call, by the agent, task and flow method that are running around it.

The role is the agent's `role` as it was written, before inputs are filled in, without white space around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cotune.recording.call_records import CallerContext
from cotune.recording.context import Scope, called_by, current_caller, entered, innermost
from cotune.records.ids import new_id

NAME = "crewai"


@dataclass(frozen=True)
class CrewState:
    """What scorers see as `call.state`."""

    agent: str
    """The agent's role with the inputs filled in; empty where no agent is at work."""
    task: str
    """Description of the task, with the inputs filled in."""
    expected_output: str
    inputs: Mapping[str, Any]
    """Inputs of the crew."""
    flow: Mapping[str, Any]
    """State of the innermost flow around the call, at the time of the call."""


@dataclass(eq=False, slots=True)
class CrewScope(Scope):
    """An agent, a task or a flow method at work. `key` names its latest output, `reads` outputs that it was given."""

    role: str
    key: str
    agent: Any = None
    task: Any = None
    flow: Any = None
    outer: CrewScope | None = None
    reads: list[str] = field(default_factory=list)

    def caller(self, output: str | None = None) -> CallerContext:
        """Who makes a call here; `output` is the id of what an agent's own call answers."""
        led = (self.outer.key,) if self.outer is not None and self.outer.agent is not None else ()
        given = self.reads if output is not None else ()
        return CallerContext(self.role, NAME, state=_state(self), read=(*led, *given, self.key), output=output)


_templates: dict[int, str] = {}
"""Role as written of agents that were copied after inputs had been filled in, by object."""


def role_of(agent: Any) -> str:
    """An agent's role as it was written: the template where it has one."""
    written = _templates.get(id(agent)) or getattr(agent, "_original_role", None) or getattr(agent, "role", None)
    return str(written or "").strip() or type(agent).__name__


def remember_template(original: Any, copied: Any) -> None:
    """A copy of an agent whose inputs were filled in keeps the role as it was written."""
    written = _templates.get(id(original)) or getattr(original, "_original_role", None)
    if written and written != getattr(copied, "role", None):
        _templates[id(copied)] = written
        weakref.finalize(copied, _templates.pop, id(copied), None)


def agent_scope(agent: Any, task: Any = None) -> CrewScope:
    """An agent that begins to work, on a task of a crew or on its own."""
    outer = innermost(CrewScope)
    if outer is not None and task is not None and outer.task is task:
        return CrewScope(role_of(agent), outer.key, agent, task, outer.flow, outer.outer, outer.reads)
    return CrewScope(role_of(agent), _key(task), agent, task, outer and outer.flow, outer, _context(agent, task))


def flow_scope(flow: Any, method: str) -> CrewScope:
    """A method of a flow: the role of calls that no agent makes."""
    return CrewScope(method, _key(None), flow=flow, outer=innermost(CrewScope))


def part_scope(name: str, *, inside: bool) -> CrewScope:
    """Something that CrewAI does with a model of its own accord; `inside` the agent that it does it for."""
    outer = innermost(CrewScope)
    if outer is None:
        return CrewScope(name, _key(None))
    role = f"{outer.role}/{name}" if inside else name
    return CrewScope(role, outer.key, outer.agent, outer.task, outer.flow, outer.outer, outer.reads)


@contextmanager
def at_work(scope: CrewScope) -> Iterator[None]:
    """Be in `scope`, and in no model's `call`; its output is then read by the agent around it."""
    try:
        with entered(scope), outside_call():
            yield
    finally:
        if scope.outer is not None and scope.outer.agent is not None:
            scope.outer.reads.append(scope.key)


@contextmanager
def outside_call() -> Iterator[None]:
    """Be in the same scope, but in no model's `call`: a tool that a model class itself runs."""
    with called_by(None):
        yield


def calling_model() -> Any:
    """The model whose `call` is running here, or None: its calls of itself or of another model are part of it."""
    caller = current_caller.get()
    return None if caller is None or caller.done else caller.model


def caller_of(agent: Any, task: Any) -> CallerContext | None:
    """Who makes a call that is an agent's; None where the call itself names no agent."""
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
    """The call made inside is the agent's that is at work, and answers for it, though it names none."""
    scope = innermost(CrewScope)
    if scope is None or scope.agent is None:
        yield
        return
    with called_by(scope.caller(output=scope.key)):
        yield


def _state(scope: CrewScope) -> CrewState:
    crew = getattr(scope.agent, "crew", None)
    return CrewState(
        agent=str(getattr(scope.agent, "role", None) or "").strip(),
        task=str(getattr(scope.task, "description", None) or ""),
        expected_output=str(getattr(scope.task, "expected_output", None) or ""),
        inputs=dict(getattr(crew, "_inputs", None) or {}),
        flow=dict(getattr(scope.flow, "_state", None) or {}),
    )


def _key(task: Any) -> str:
    return f"crewai:{task.id}" if getattr(task, "id", None) is not None else f"crewai:{new_id()}"


def _context(agent: Any, task: Any) -> list[str]:
    """Tasks whose outputs a task is given: those it names, else all that its crew has finished before it."""
    if task is None:
        return []
    named = getattr(task, "context", None)
    if not isinstance(named, list | tuple):
        tasks = list(getattr(getattr(agent, "crew", None), "tasks", None) or ())
        before = next((i for i, one in enumerate(tasks) if one is task), 0)
        named = [one for one in tasks[:before] if one.output is not None] if named is not None else []
    return [_key(one) for one in named]
