"""Hooks AutoGen's core. An agent that receives a message from a runtime has a scope, named by the type of the agent.

A runtime may have started before any episode, so the episode of each message is remembered when it is sent. Messages of
agentchat's teams belong to the episode of their team, whose id is the key of its members.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from autogen_core import BaseAgent, SingleThreadedAgentRuntime
from autogen_core.tools import BaseStreamTool, BaseTool

from cotune.integrations.apps.autogen.clients import ClientAttribute, lineage_of
from cotune.integrations.apps.autogen.scopes import AutogenScope, in_scope, open_scope
from cotune.integrations.apps.patching import record_tools, replace_method
from cotune.integrations.versions import require_hooks
from cotune.recording.app_parts import Part, Parts
from cotune.recording.context import current_episode, entered, recording
from cotune.recording.recorder import LiveEpisode
from cotune.recording.tape import tool_at_work
from cotune.runtime.process_state import ProcessState
from cotune.runtime.user_code import context_value


@dataclass(frozen=True, eq=False)
class Running:
    """A team at work in an episode. `scope_of` returns the scope of a member."""

    episode: LiveEpisode
    scope_of: Callable[[Any], AutogenScope]


_OF_TEAM = re.compile("_[0-9a-f]{8}-[0-9a-f]{4}-")
"""Part of the type name of each member of agentchat's teams: the beginning of the team's id."""
_STOPPED = "_cotune_stopped"


class AtWork(ProcessState):
    """The episodes of teams and messages. AutoGen's runtimes handle messages in other tasks, outside the episode."""

    def __init__(self) -> None:
        self.teams: dict[str, Running] = {}
        """Team id -> its episode."""
        self.messages: WeakValueDictionary[str, LiveEpisode] = WeakValueDictionary()
        """Message id -> the episode that it was sent in."""


at_work = AtWork()


def install() -> None:
    """Hook agents, the runtime and tools. Raises UnsupportedVersion if this version of AutoGen lacks a method."""
    require_hooks("autogen-core", BaseAgent, "on_message")
    require_hooks("autogen-core", SingleThreadedAgentRuntime, "send_message", "publish_message")
    require_hooks("autogen-core", BaseTool, "run_json")
    require_hooks("autogen-core", BaseStreamTool, "run_json_stream")

    def is_unmarked(record: logging.LogRecord) -> bool:
        """Filter of AutoGen's log, which leaves out the cancellations that `_mark_cancellation` has marked."""
        error = record.exc_info[1] if record.exc_info else None
        return not getattr(error, _STOPPED, False)

    autogen_logger = logging.getLogger(BaseAgent.__module__.partition(".")[0])
    autogen_logger.addFilter(is_unmarked)
    BaseAgent._model_client = ClientAttribute()  # type: ignore[attr-defined]
    replace_method(BaseAgent, "on_message", _on_message)
    replace_method(SingleThreadedAgentRuntime, "send_message", _wrap_send)
    replace_method(SingleThreadedAgentRuntime, "publish_message", _wrap_send)
    record_tools(BaseTool, "run")
    in_tool_scope = functools.partial(in_scope, _tool_scope, _note_tool_result)
    replace_method(BaseTool, "run_json", lambda original: in_tool_scope(_wrap_run_json(original)))
    replace_method(BaseStreamTool, "run_json_stream", in_tool_scope)


def _wrap_send(original: Any) -> Any:
    """Wrap a method that sends a message: remember the episode of the message by its id."""

    async def send(self: Any, *args: Any, message_id: str | None = None, **options: Any) -> Any:
        episode = current_episode.get()
        if episode is not None:
            message_id = message_id or str(uuid.uuid4())
            at_work.messages[message_id] = episode
        return await original(self, *args, message_id=message_id, **options)

    return send


def _on_message(original: Any) -> Any:
    """Wrap the method that receives a message: the agent runs in the episode and scope of that message."""

    async def on_message(self: Any, message: Any, ctx: Any) -> Any:
        """Handle a message inside the role of its agent, and inside the episode that sent it."""
        # The members of a team have the team's id as their key.
        team = at_work.teams.get(self.id.key)
        if team is not None:
            with recording(team.episode), entered(team.scope_of(self)), _mark_cancellation(team.episode):
                return await original(self, message, ctx)
        # A runtime that started before the episode handles messages outside of it, so the message's episode comes
        # first.
        episode = at_work.messages.get(ctx.message_id) or current_episode.get()
        if episode is None:
            return await original(self, message, ctx)
        if episode.parts is not None:
            _report_parts(episode.parts, self)
        with recording(episode), entered(open_scope(self, self.id.type)), _mark_cancellation(episode):
            return await original(self, message, ctx)

    return on_message


def _report_parts(parts: Parts, agent: Any) -> None:
    """Report that an agent is at work, and the agent types of its runtime."""
    parts.enter(agent.id.type)
    runtime = agent.runtime
    types = getattr(runtime, "_agent_factories", ())
    parts.add(Part(name, "agent type", type(runtime).__name__, name) for name in types if not _OF_TEAM.search(name))


@contextmanager
def _mark_cancellation(episode: LiveEpisode) -> Iterator[None]:
    """Mark the cancellation of an episode that was stopped by Ctrl-C or its time-out.

    The stop is reported elsewhere. Without the mark, the runtime would log a traceback for each message in progress.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if episode.interrupted:
            error.__dict__[_STOPPED] = True
        raise


def _wrap_run_json(original: Any) -> Any:
    """Wrap the method `run_json` of tools: note the id of the tool call that the tool answers, for its recording."""

    async def run_json(
        self: Any, args: Any, cancellation_token: Any, call_id: str | None = None, **options: Any
    ) -> Any:
        tool_in_call = tool_at_work.get()._replace(answered_call=call_id or "")
        with context_value(tool_at_work, tool_in_call):
            return await original(self, args, cancellation_token, call_id=call_id, **options)

    return run_json


def _tool_scope(tool: Any, *args: Any, **options: Any) -> AutogenScope:
    return open_scope(tool, tool.name, part=True)


def _note_tool_result(
    episode: LiveEpisode, scope: AutogenScope, item: Any, args: Sequence[Any], options: dict[str, Any]
) -> None:
    """Note that the result of a tool comes from the last call of the agents that ran inside the tool. A call that
    reads the result then has this call as its parent.
    """
    call_id = options.get("call_id")
    if not call_id and len(args) > 2:
        call_id = args[2]  # `run_json(args, cancellation_token, call_id)`
    if call_id and scope.last_output:
        lineage_of(episode).answered(call_id, scope.last_output)
        scope.last_output = None
