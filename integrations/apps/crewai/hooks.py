"""CrewAI: enters a scope around agents, tasks, flow methods and guardrails, and runs crews and flows."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from crewai import Agent, Crew, Flow, Task
from crewai.agents.agent_builder.base_agent import BaseAgent
from crewai.flow.runtime import Flow as RuntimeFlow
from crewai.lite_agent import LiteAgent
from crewai.tools import BaseTool

from cotune.errors import WorkflowError
from cotune.integrations.apps.crewai import models as crewai_models
from cotune.integrations.apps.crewai.scopes import (
    CrewScope,
    agent_scope,
    at_work,
    flow_scope,
    last_answer,
    part_scope,
    remember_template,
    role_of,
)
from cotune.integrations.apps.patching import inside, record_tools
from cotune.integrations.versions import require_hooks
from cotune.recording.app_parts import Part, Parts
from cotune.recording.context import current_episode

ScopeOf = Callable[[Any, dict[str, Any]], CrewScope | None]
"""The scope of a method's call, by its object and its arguments; None where it opens none."""
_KICKOFFS = ("kickoff", "kickoff_async", "akickoff")
_GUARDED = ("crewai.task", "crewai.agent.core", "crewai.lite_agent")
"""Modules that run the guardrails of tasks and agents, each by its own name for the function."""
_FINISHING = ("crewai.agents.agent_executor", "crewai.lite_agent")
"""Modules that ask an agent at its `max_iter` for its answer, in a call that names no agent."""


def install() -> None:
    """Hook agents, tasks, flows and models. Raises UnsupportedVersion where this CrewAI lacks a hook."""
    crewai_models.install()
    record_tools(BaseTool, "run", "_run", "arun", "_arun")
    for name in ("execute_task", "aexecute_task"):
        _scoped(Agent, name, lambda agent, given: agent_scope(agent, given.get("task")))
    for name in _KICKOFFS:
        _scoped(Agent, name, lambda agent, given: agent_scope(agent))
        _scoped(LiteAgent, name, lambda agent, given: agent_scope(agent))
    for name in ("_execute_core", "_aexecute_core"):
        _scoped(
            Task, name, lambda task, given: agent_scope(at, task) if (at := given.get("agent") or task.agent) else None
        )
    # The agent executor and the memory are flows too, but not the application's.
    _scoped(
        RuntimeFlow,
        "_execute_method",
        lambda flow, given: None if type(flow).is_crewai_internal else flow_scope(flow, str(given["method_name"])),
    )
    BaseAgent.copy = _copy(BaseAgent.copy)  # type: ignore[method-assign, assignment]
    for module in (sys.modules[name] for name in _GUARDED):
        module.process_guardrail = inside(  # type: ignore[attr-defined]
            module.process_guardrail, lambda *args, **kwargs: at_work(part_scope("guardrail", inside=False))
        )
    for name in _FINISHING:
        module = importlib.import_module(name)
        module.handle_max_iterations_exceeded = inside(  # type: ignore[attr-defined]
            module.handle_max_iterations_exceeded, lambda *args, **kwargs: last_answer()
        )


def runner(app: object) -> Callable[[Any], Awaitable[Any]] | None:
    """Run a crew, a flow or a class of flows on inputs, each time on a copy of its own; None for anything else."""
    if isinstance(app, Crew):
        return functools.partial(_run_crew, app)
    if isinstance(app, type) and issubclass(app, RuntimeFlow):
        return functools.partial(_run_flow, app)
    if isinstance(app, RuntimeFlow):
        return functools.partial(_run_flow, _factory(app))
    return None


async def _run_crew(crew: Crew, inputs: Any) -> Any:
    copied = crew.copy()
    copied.stream = False
    return await copied.kickoff_async(inputs=inputs)


async def _run_flow(make: Callable[[], Any], inputs: Any) -> Any:
    flow = make()
    flow.stream = False
    await flow.kickoff_async(inputs=inputs)
    return flow.state


def _factory(flow: Any) -> Callable[[], Any]:
    """How to make another flow like this one."""
    if type(flow) in (Flow, RuntimeFlow):
        raise WorkflowError(
            "A flow made from a declaration cannot be run more than once.",
            "Write a workflow function that makes the flow: def solve(task): Flow.from_declaration(...).kickoff(...).",
        )
    cls: Any = type(flow)
    fields = {name: getattr(flow, name) for name in cls.model_fields if name in flow.model_fields_set}
    return functools.partial(cls, **fields)


def _scoped(cls: Any, name: str, scope_of: ScopeOf) -> None:
    """Make a method run in the scope that `scope_of(self, arguments)` gives."""
    require_hooks("crewai", cls, name)
    original = vars(cls)[name]
    names = [one for one in inspect.signature(original).parameters if one != "self"]

    def context(self: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None] | None:
        scope = scope_of(self, {**dict(zip(names, args, strict=False)), **kwargs})
        episode = current_episode.get()
        if scope is None:
            return None
        if episode is not None and episode.parts is not None:
            _report_parts(episode.parts, scope)
        return at_work(scope)

    type.__setattr__(cls, name, inside(original, context))


_ITS_OWN = ("Task Execution Planner", "Guardrail Agent")
"""Agents that CrewAI makes for a crew, and that belong to none."""


def _report_parts(parts: Parts, scope: CrewScope) -> None:
    """Report the agents of the crew, or the methods of the flow, that `scope` belongs to, and that it works."""
    parts.enter(scope.role)
    crew = getattr(scope.agent, "crew", None)
    if crew is not None:
        agents = [*crew.agents, *([crew.manager_agent] if crew.manager_agent is not None else ())]
        name = crew.name or "crew"
        parts.add(Part(role_of(agent), "agent", name, str(agent.role).strip()) for agent in agents)
    elif scope.role in _ITS_OWN:
        parts.add([Part(scope.role, "agent", "CrewAI", scope.role)])
    if scope.agent is None and scope.flow is not None:
        name = type(scope.flow).__name__
        parts.add(Part(str(method), "method", name, str(method)) for method in scope.flow._methods)


def _copy(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def copy(self: Any) -> Any:
        copied = original(self)
        remember_template(self, copied)
        return copied

    return copy
