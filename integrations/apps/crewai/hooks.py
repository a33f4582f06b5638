"""Hooks CrewAI: enters a scope around agents, tasks, flow methods and guardrails. Runs crews and flows."""

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
    enter_scope,
    flow_scope,
    last_answer,
    part_scope,
    remember_template,
    role_of,
)
from cotune.integrations.apps.patching import record_tools, run_inside
from cotune.integrations.versions import require_hooks
from cotune.recording.app_parts import Part, Parts
from cotune.recording.context import current_episode

ScopeOf = Callable[[Any, dict[str, Any]], CrewScope | None]
"""The scope of a method's call, from its object and its arguments; None if the call opens no scope."""
_GUARDRAIL_MODULES = ("crewai.task", "crewai.agent.core", "crewai.lite_agent")
"""Modules that run the guardrails of tasks and agents. Each has imported the function under its own name."""
_FINAL_ANSWER_MODULES = ("crewai.agents.agent_executor", "crewai.lite_agent")
"""Modules that ask an agent for its final answer at `max_iter`, in a call that names no agent."""


def install() -> None:
    """Hook agents, tasks, flows and models. Raises UnsupportedVersion if this version of CrewAI lacks a method."""
    crewai_models.install()
    record_tools(BaseTool, "run", "_run", "arun", "_arun")
    # 1. Methods that run an agent, a task or a flow: calls inside them get its role.
    for name in ("execute_task", "aexecute_task"):
        _run_in_scope(Agent, name, lambda agent, arguments: agent_scope(agent, arguments.get("task")))
    for name in ("kickoff", "kickoff_async", "akickoff"):
        _run_in_scope(Agent, name, lambda agent, arguments: agent_scope(agent))
        _run_in_scope(LiteAgent, name, lambda agent, arguments: agent_scope(agent))
    for name in ("_execute_core", "_aexecute_core"):
        _run_in_scope(Task, name, _task_scope)
    _run_in_scope(RuntimeFlow, "_execute_method", _flow_scope)
    BaseAgent.copy = _wrap_copy(BaseAgent.copy)  # type: ignore[method-assign, assignment]

    # 2. Functions of CrewAI that ask a model without naming an agent.
    for name in _GUARDRAIL_MODULES:
        module = sys.modules[name]
        module.process_guardrail = run_inside(  # type: ignore[attr-defined]
            module.process_guardrail, lambda *args, **kwargs: enter_scope(part_scope("guardrail", inside=False))
        )
    for name in _FINAL_ANSWER_MODULES:
        module = importlib.import_module(name)
        module.handle_max_iterations_exceeded = run_inside(  # type: ignore[attr-defined]
            module.handle_max_iterations_exceeded, lambda *args, **kwargs: last_answer()
        )


def _task_scope(task: Any, arguments: dict[str, Any]) -> CrewScope | None:
    agent = arguments.get("agent") or task.agent
    return agent_scope(agent, task) if agent else None


def _flow_scope(flow: Any, arguments: dict[str, Any]) -> CrewScope | None:
    # CrewAI's agent executor and memory are flows too, but no parts of the application.
    if type(flow).is_crewai_internal:
        return None
    return flow_scope(flow, str(arguments["method_name"]))


def runner(app: object) -> Callable[[Any], Awaitable[Any]] | None:
    """A function that runs a crew, a flow or a class of flows on inputs, each time a copy; None for anything else."""
    if isinstance(app, Crew):
        return functools.partial(_run_crew, app)
    if isinstance(app, type) and issubclass(app, RuntimeFlow):
        return functools.partial(_run_flow, app)
    if isinstance(app, RuntimeFlow):
        return functools.partial(_run_flow, _flow_factory(app))
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


def _flow_factory(flow: Any) -> Callable[[], Any]:
    """A function that makes a new flow of the same class, with the values that the user has set in this one.

    Raises WorkflowError for a flow that was made from a declaration, as its class does not have its methods.
    """
    if type(flow) in (Flow, RuntimeFlow):
        raise WorkflowError(
            "A flow made from a declaration cannot be run more than once.",
            "Write a workflow function that makes the flow: def solve(task): Flow.from_declaration(...).kickoff(...).",
        )
    cls: Any = type(flow)
    fields = {name: getattr(flow, name) for name in cls.model_fields if name in flow.model_fields_set}
    return functools.partial(cls, **fields)


def _run_in_scope(cls: Any, name: str, scope_of: ScopeOf) -> None:
    """Make a method run in the scope that `scope_of(self, arguments)` returns."""
    require_hooks("crewai", cls, name)
    original = vars(cls)[name]
    parameters = [name for name in inspect.signature(original).parameters if name != "self"]

    def context(self: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None] | None:
        """The scope in which the method runs, with the role of its agent or flow method; None if it has no role."""
        # `strict=False`: the call may leave out parameters with defaults.
        positional = dict(zip(parameters, args, strict=False))
        scope = scope_of(self, {**positional, **kwargs})
        if scope is None:
            return None
        # A check of an application (`cotune check`) collects its parts, to name agents that never call a model.
        episode = current_episode.get()
        if episode is not None and episode.parts is not None:
            _report_parts(episode.parts, scope)
        return enter_scope(scope)

    type.__setattr__(cls, name, run_inside(original, context))


_AGENTS_OF_CREWAI = ("Task Execution Planner", "Guardrail Agent")
"""Agents that CrewAI creates itself, and that belong to no crew."""


def _report_parts(parts: Parts, scope: CrewScope) -> None:
    """Report that `scope` is at work, and the agents of its crew or the methods of its flow."""
    parts.enter(scope.role)
    crew = getattr(scope.agent, "crew", None)
    if crew is not None:
        agents = list(crew.agents)
        if crew.manager_agent is not None:
            agents.append(crew.manager_agent)
        crew_name = crew.name or "crew"
        parts.add(Part(role_of(agent), "agent", crew_name, str(agent.role).strip()) for agent in agents)
    elif scope.role in _AGENTS_OF_CREWAI:
        parts.add([Part(scope.role, "agent", "CrewAI", scope.role)])
    if scope.agent is None and scope.flow is not None:
        flow_name = type(scope.flow).__name__
        parts.add(Part(str(method), "method", flow_name, str(method)) for method in scope.flow._methods)


def _wrap_copy(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `copy` of agents: the copy keeps the role as the application wrote it, without filled-in inputs."""

    @functools.wraps(original)
    def copy(self: Any) -> Any:
        copied = original(self)
        remember_template(self, copied)
        return copied

    return copy
