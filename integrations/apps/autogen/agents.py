"""AutoGen's chat agents: in an episode they work in scopes of their own, and their model clients name them.

Everything is hooked on classes, so it does not matter when the objects are made. Calls that go around an agent's model
client (another client in its own code, a tool that calls a model) belong to the scope around them.
"""

from __future__ import annotations

import functools
from typing import Any

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response

from cotune.integrations.apps.autogen.clients import ClientAttribute, lineage_of
from cotune.integrations.apps.autogen.scopes import AutogenScope, open_scope, stepped
from cotune.integrations.apps.patching import each_subclass, replace_method
from cotune.recording.context import current_episode, entered
from cotune.recording.recorder import LiveEpisode


def install() -> None:
    """Hook agents, those there are and those to come."""
    BaseChatAgent._model_client = ClientAttribute()  # type: ignore[attr-defined]
    each_subclass(BaseChatAgent, _wrap_agent)


def _wrap_agent(cls: type) -> None:
    replace_method(cls, "on_messages", _on_messages)
    replace_method(cls, "on_messages_stream", _on_messages_stream)


def _on_messages(original: Any) -> Any:
    async def on_messages(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        if episode is None:
            return await original(self, messages, *args, **options)
        scope = open_scope(self, self.name, received=tuple(messages))
        with entered(scope):
            response = await original(self, messages, *args, **options)
        _has_answered(episode, scope, response)
        return response

    return on_messages


def _on_messages_stream(original: Any) -> Any:
    def on_messages_stream(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        source = original(self, messages, *args, **options)
        if episode is None or not hasattr(source, "aclose"):
            return source
        scope = open_scope(self, self.name, received=tuple(messages))
        return stepped(scope, source, functools.partial(_has_answered, episode, scope))

    return on_messages_stream


def _has_answered(episode: LiveEpisode, scope: AutogenScope, item: Any) -> None:
    """An agent's response names the last call it was made from."""
    if not isinstance(item, Response) or not scope.last_output:
        return
    try:
        message = item.chat_message
        content = getattr(message.to_model_message(), "content", None)
        lineage_of(episode).add(message.source, content, scope.last_output)
    except Exception as error:  # noqa: BLE001
        episode.warn("autogen", "The AutoGen integration could not tell which call an agent's answer is from.", error)
    scope.hand_on()
