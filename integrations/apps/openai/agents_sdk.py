"""The OpenAI Agents SDK: each turn's model names its agent, and a model that a tool calls is the tool's.

Requests are recorded and answered on the wire, by the OpenAI SDK's integration. The SDK's own tracing is not touched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any

from cotune.integrations.apps.clients import AgentState, Proxy, step_inside
from cotune.integrations.apps.patching import run_inside
from cotune.integrations.versions import require_hooks
from cotune.recording.app_parts import Part, Parts
from cotune.recording.call_records import CallerContext
from cotune.recording.context import Scope, called_by, current_episode, entered
from cotune.recording.recorder import LiveEpisode

NAME = "openai-agents"
_INVOKE = ("_invoke_function_tool_with_metadata", "invoke_function_tool")
"""Names of the method that runs a function tool, in newer and older versions of the SDK."""


@dataclass(slots=True, eq=False)
class ToolScope(Scope):
    """A function tool at work, which may call a model itself."""

    agent: Any
    name: str

    def caller(self) -> CallerContext:
        return CallerContext(f"{_name(self.agent)}/{self.name}", NAME, state=AgentState(self.agent))


def install() -> None:
    """Hook the functions that get the model of an agent and run a tool. Raises UnsupportedVersion if one is missing."""
    from agents.run_internal import run_loop, tool_execution

    require_hooks(NAME, run_loop, "get_model")
    newer_name, older_name = _INVOKE
    invoke = newer_name if hasattr(tool_execution, newer_name) else older_name
    require_hooks(NAME, tool_execution, invoke)
    run_loop.get_model = _get_model(run_loop.get_model)

    def tool_scope(*, function_tool: Any, context: Any, **_: Any) -> AbstractContextManager[None]:
        return entered(ToolScope(getattr(context, "agent", None), function_tool.name))

    setattr(tool_execution, invoke, run_inside(getattr(tool_execution, invoke), tool_scope))


def runner(app: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """Run an agent on an input; None for any other object, also of another package named `agents`."""
    if "agents.run_internal" not in sys.modules:
        return None
    from agents import Agent, Runner

    return functools.partial(Runner.run, app) if isinstance(app, Agent) else None


class AgentModel(Proxy):
    """A model that is asked in the name of an agent."""

    __slots__ = ()

    async def get_response(self, *args: Any, **options: Any) -> Any:
        """Ask the model, in the agent's name."""
        caller = _caller(self._cotune_owner)
        with called_by(caller):
            response = await self._cotune_inner.get_response(*args, **options)
        _close_caller(caller)
        return response

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Ask the model, and yield the events of its answer. The call gets the role of the agent."""
        caller = _caller(self._cotune_owner)
        source = self._cotune_inner.stream_response(*args, **options)
        # The model sends its request in the first step of the stream, so the caller is set during each step. Between
        # two steps the application's code runs, whose calls are not the agent's.
        async with aclosing(step_inside(lambda: called_by(caller), source)) as events:
            async for event in events:
                yield event
        _close_caller(caller)


def _get_model(original: Any) -> Any:
    """Wrap the function that returns an agent's model: inside an episode the model names its agent."""

    @functools.wraps(original)
    def get_model(agent: Any, *args: Any, **options: Any) -> Any:
        """The model of an agent, wrapped so that its calls get the role of the agent."""
        model = original(agent, *args, **options)
        episode = current_episode.get()
        if episode is None:
            return model
        if episode.parts is not None:
            _report_parts(episode.parts, agent)
        return AgentModel(model, agent)

    return get_model


def _report_parts(parts: Parts, agent: Any) -> None:
    """Report that an agent is at work, and the agents that it may hand over to."""
    name = _name(agent)
    parts.enter(name)
    for handoff in getattr(agent, "handoffs", ()):
        other = str(getattr(handoff, "agent_name", None) or _name(handoff))
        parts.add([Part(other, "agent", name, other)])


def _caller(agent: Any) -> CallerContext:
    return CallerContext(_name(agent), NAME, state=AgentState(agent))


def _name(agent: Any) -> str:
    return str(getattr(agent, "name", None) or "app")


def _close_caller(caller: CallerContext) -> None:
    """Close the caller of an answered call. Warns if the OpenAI SDK sent no request for the call."""
    caller.done = True
    episode: LiveEpisode | None = current_episode.get()
    if episode is not None and not caller.calls:
        text = f"A model answered agent {caller.role!r} without a request of the OpenAI SDK: that is not recorded."
        episode.warn("unseen_call", text)
