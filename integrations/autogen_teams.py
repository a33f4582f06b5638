"""AutoGen's teams: frames of their own, and episodes that find their way through any agent runtime.

A team's messages reach its members through a runtime. One that the application has started itself handles them in a
context of its own, so the episode of a running team is looked up by the team's id, which is the key of its members.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autogen_agentchat.base import ChatAgent, TaskResult, Team
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_agentchat.teams._group_chat._magentic_one._magentic_one_orchestrator import MagenticOneOrchestrator
from autogen_agentchat.teams._group_chat._selector_group_chat import SelectorGroupChatManager
from autogen_core import BaseAgent

from cotune.context import current_episode
from cotune.integrations.autogen_client import ClientAttribute
from cotune.integrations.autogen_copies import fresh
from cotune.integrations.autogen_frames import Frame, enter, hand_on, stepped, within
from cotune.integrations.class_hooks import each_subclass, replace_method
from cotune.integrations.versions import missing_hook
from cotune.recorder import LiveEpisode

_PARTS = {SelectorGroupChatManager: "selector", MagenticOneOrchestrator: "orchestrator"}
"""What the manager of a team is called, by its class; any other is its `manager`."""


@dataclass(frozen=True, eq=False)
class _Running:
    """A team at work in an episode."""

    episode: LiveEpisode
    frame: Frame


_running: dict[str, _Running] = {}
"""By team id."""


def install() -> None:
    """Hook teams and what handles their messages. Raises UnsupportedVersion where a hook is missing."""
    if "on_message" not in BaseAgent.__dict__:
        raise missing_hook("autogen-core", "BaseAgent.on_message")
    BaseGroupChat._model_client = ClientAttribute()  # type: ignore[attr-defined]
    BaseAgent._model_client = ClientAttribute()  # type: ignore[attr-defined]
    each_subclass(BaseGroupChat, lambda cls: replace_method(cls, "run_stream", _run_stream))
    replace_method(BaseAgent, "on_message", _on_message)


def runner(app: Any) -> Callable[[Any], Awaitable[Any]] | None:
    """Run a team or an agent on a task, each time as a copy of its own; None for what is neither."""
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
    frame = enter(team, team.name)

    def ended(item: Any) -> None:
        if isinstance(item, TaskResult):
            hand_on(frame)

    before = _running.get(team._team_id)
    if not team._is_running:
        _running[team._team_id] = _Running(episode, frame)
    items = stepped(frame, source, ended)
    try:
        async for item in items:
            yield item
    finally:
        await items.aclose()
        if before is None:
            _running.pop(team._team_id, None)


def _on_message(original: Any) -> Any:
    async def on_message(self: Any, message: Any, ctx: Any) -> Any:
        run = _running.get(self.id.key)
        if run is None and current_episode.get() is None:
            return await original(self, message, ctx)
        if run is None:
            with within(enter(self, self.id.type)):
                return await original(self, message, ctx)
        frame = run.frame
        if isinstance(self, BaseGroupChatManager):
            part = next((name for cls, name in _PARTS.items() if isinstance(self, cls)), "manager")
            frame = Frame(self, part, run.frame, run.frame.names, part=True)
        with _inside(run.episode), within(frame):
            return await original(self, message, ctx)

    return on_message


@contextmanager
def _inside(episode: LiveEpisode) -> Iterator[None]:
    token = current_episode.set(episode)
    try:
        yield
    finally:
        current_episode.reset(token)
