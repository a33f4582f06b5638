"""Hooks AutoGen's teams. Each has a scope, which its members and manager find in any runtime that runs them."""

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
from cotune.integrations.apps.autogen.copies import copy_application
from cotune.integrations.apps.autogen.runtime import Running, at_work
from cotune.integrations.apps.autogen.scopes import AutogenScope, open_scope, step_in_scope
from cotune.integrations.apps.patching import replace_methods
from cotune.recording.context import current_episode
from cotune.recording.recorder import LiveEpisode

_PARTS = {SelectorGroupChatManager: "selector", MagenticOneOrchestrator: "orchestrator"}
"""Class of a team's manager -> its name in roles; any other is called `manager`."""


def install() -> None:
    """Hook teams of all classes, present and future."""
    BaseGroupChat._model_client = ClientAttribute()  # type: ignore[attr-defined]
    replace_methods(BaseGroupChat, _run_stream, "run_stream")


def runner(app: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """A function that runs the team or agent `app` on a task; None for any other object. Each run gets a copy of the
    team, because a team keeps the messages of its earlier runs.
    """
    if not isinstance(app, ChatAgent | Team):
        return None

    async def run(task: Any) -> Any:
        return await copy_application(app).run(task=task)

    return run


def _run_stream(original: Any) -> Any:
    def run_stream(self: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        source = original(self, *args, **options)
        return source if episode is None else _at_work(self, episode, source)

    return run_stream


async def _at_work(team: Any, episode: LiveEpisode, source: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Run the stream of a team in the team's scope. Members of the team run in other tasks, and find the scope in the
    table `at_work.teams`, where it is registered until the stream ends.
    """
    scope = open_scope(team, team.name)

    def pass_on_result(item: Any) -> None:
        if isinstance(item, TaskResult):
            scope.hand_on()

    # A team that is already running raises an error at its first step. The entry of the other run must stay.
    entry_of_other_run = at_work.teams.get(team._team_id)
    if not team._is_running:
        at_work.teams[team._team_id] = Running(episode, functools.partial(_member_scope, scope))
    try:
        async with aclosing(step_in_scope(scope, source, pass_on_result)) as items:
            async for item in items:
                yield item
    finally:
        if entry_of_other_run is None:
            at_work.teams.pop(team._team_id, None)


def _member_scope(team: AutogenScope, agent: Any) -> AutogenScope:
    """The scope of an agent that receives a message in a team: the team's scope or, for the manager, a part of it."""
    if not isinstance(agent, BaseGroupChatManager):
        return team
    part = next((name for cls, name in _PARTS.items() if isinstance(agent, cls)), "manager")
    return AutogenScope(agent, part, team, team.names, part=True)
