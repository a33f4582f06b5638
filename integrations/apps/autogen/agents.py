"""AutoGen's chat agents: in an episode they work in scopes of their own, and their model clients name them.

Everything is hooked on classes, so it does not matter when the objects are made. Calls that go around an agent's model
client (another client in its own code, a tool that calls a model) belong to the scope around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response

from cotune.integrations.apps.autogen.clients import ClientAttribute, lineage_of
from cotune.integrations.apps.autogen.scopes import AutogenScope, in_scope, open_scope
from cotune.integrations.apps.patching import replace_methods
from cotune.recording.recorder import LiveEpisode


def install() -> None:
    """Hook agents of all classes, present and future."""
    BaseChatAgent._model_client = ClientAttribute()  # type: ignore[attr-defined]

    def scope(agent: Any, messages: Any, *args: Any, **options: Any) -> AutogenScope:
        return open_scope(agent, agent.name, received=tuple(messages))

    replace_methods(BaseChatAgent, partial(in_scope, scope, _note_response), "on_messages", "on_messages_stream")


def _note_response(episode: LiveEpisode, scope: AutogenScope, item: Any, args: Sequence[Any], options: Any) -> None:
    """Note that an agent's response comes from the last call that the agent made, so that later calls which read the
    response get this call as a parent. Items of an agent that are no response are skipped.
    """
    if not isinstance(item, Response) or not scope.last_output:
        return
    try:
        message = item.chat_message
        content = getattr(message.to_model_message(), "content", None)
        lineage_of(episode).add(message.source, content, scope.last_output)
    except Exception as error:  # noqa: BLE001
        episode.warn("autogen", "The AutoGen integration could not tell which call an agent's answer is from.", error)
    scope.hand_on()
