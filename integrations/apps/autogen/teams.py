"""AutoGen's teams: scopes of their own, which their members and managers find in whatever runtime runs them."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from autogen_agentchat.base import ChatAgent, TaskResult, Team
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_agentchat.teams._group_chat._magentic_one._magentic_one_orchestrator import MagenticOneOrchestrator
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager

from cotune.integrations.apps.autogen.clients import ClientAttribute
from cotune.integrations.apps.autogen.copies import fresh
from cotune.integrations.apps.autogen.runtime import Running, at_work
from cotune.integrations.apps.autogen.scopes import AutogenScope, open_scope, stepped
from cotune.integrations.apps.patching import replace_methods
from cotune.recording.context import current_episode
from cotune.recording.recorder import LiveEpisode

_PARTS = {SelectorGroupChatManager: "selector", MagenticOneOrchestrator: "orchestrator"}
"""What the manager of a team is called, by its class; any other is its `manager`."""


def install() -> None:
    """Hook teams, those there are and those to come."""
    BaseGroupChat._model_client = ClientAttribute()  # type: ignore[attr-defined]
    replace_methods(BaseGroupChat, _run_stream, "run_stream")


def runner(app: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """Run a team or an agent on a task, each time as a copy of its own; None for any other object."""
    if not isinstance(app, ChatAgent | Team):
        return None

    async def run(given: Any) -> Any:
        return await fresh(app).run(task=given)

    return run


def _run_stream(original: Any) -> Any:
    def run_stream(self: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        source = original(self, *args, **options)
        return source if episode is None else _at_work(self, episode, source)

    return run_stream


async def _at_work(team: Any, episode: LiveEpisode, source: AsyncIterator[Any]) -> AsyncIterator[Any]:
    scope = open_scope(team, team.name)

    def seen(item: Any) -> None:
        if isinstance(item, TaskResult):
            scope.hand_on()

    before = at_work.teams.get(team._team_id)
    if not team._is_running:
        at_work.teams[team._team_id] = Running(episode, functools.partial(_member, scope))
    try:
        async with aclosing(stepped(scope, source, seen)) as items:
            async for item in items:
                yield item
    finally:
        if before is None:
            at_work.teams.pop(team._team_id, None)


def _member(team: AutogenScope, agent: Any) -> AutogenScope:
    """The scope of an agent that a team's runtime hands a message to: the team's own, or its manager's."""
    if not isinstance(agent, BaseGroupChatManager):
        return team
    part = next((name for cls, name in _PARTS.items() if isinstance(agent, cls)), "manager")
    return AutogenScope(agent, part, team, team.names, part=True)
