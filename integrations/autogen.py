"""AutoGen's agents and tools: in an episode they work in frames of their own, and their model clients name them.

Everything is hooked on classes, so it does not matter when the objects are made. Calls that go around an agent's model
client (another client in its own code, a tool that calls a model) belong to the frame around them.
"""

from __future__ import annotations

import functools
from typing import Any

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response
from autogen_core.tools import BaseStreamTool, BaseTool

from cotune.context import current_episode, scopes
from cotune.integrations.autogen_client import ClientAttribute, said
from cotune.integrations.autogen_frames import Frame, enter, hand_on, scope, stepped, within
from cotune.integrations.class_hooks import each_subclass, replace_method
from cotune.integrations.versions import missing_hook
from cotune.recorder import LiveEpisode


def install() -> None:
    """Hook agents and tools, those there are and those to come. Raises UnsupportedVersion where a hook is missing."""
    for cls, name in ((BaseTool, "run_json"), (BaseStreamTool, "run_json_stream")):
        if name not in cls.__dict__:
            raise missing_hook("autogen-core", f"{cls.__name__}.{name}")
    BaseChatAgent._model_client = ClientAttribute()  # type: ignore[attr-defined]
    each_subclass(BaseChatAgent, _wrap_agent)
    replace_method(BaseTool, "run_json", _tool)
    replace_method(BaseStreamTool, "run_json_stream", _tool_stream)
    scopes.insert(0, scope)


def _wrap_agent(cls: type) -> None:
    replace_method(cls, "on_messages", _on_messages)
    replace_method(cls, "on_messages_stream", _on_messages_stream)


def _on_messages(original: Any) -> Any:
    async def on_messages(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        if episode is None:
            return await original(self, messages, *args, **options)
        frame = enter(self, self.name, received=tuple(messages))
        with within(frame):
            response = await original(self, messages, *args, **options)
        _left(episode, frame, response)
        return response

    return on_messages


def _on_messages_stream(original: Any) -> Any:
    def on_messages_stream(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        source = original(self, messages, *args, **options)
        if episode is None or not hasattr(source, "aclose"):
            return source
        frame = enter(self, self.name, received=tuple(messages))
        return stepped(frame, source, functools.partial(_left, episode, frame))

    return on_messages_stream


def _left(episode: LiveEpisode, frame: Frame, item: Any) -> None:
    """An agent's response names the last call it was made from."""
    if not isinstance(item, Response) or not frame.last:
        return
    try:
        message = item.chat_message
        said(episode).add(message.source, getattr(message.to_model_message(), "content", None), frame.last)
    except Exception as error:  # noqa: BLE001
        episode.warn("autogen", "The AutoGen integration could not tell what an agent said.", error)
    hand_on(frame)


def _tool(original: Any) -> Any:
    async def run_json(self: Any, args: Any, *rest: Any, **options: Any) -> Any:
        episode = current_episode.get()
        if episode is None:
            return await original(self, args, *rest, **options)
        frame = enter(self, self.name, part=True)
        with within(frame):
            result = await original(self, args, *rest, **options)
        _answered(episode, frame, rest, options)
        return result

    return run_json


def _tool_stream(original: Any) -> Any:
    def run_json_stream(self: Any, args: Any, *rest: Any, **options: Any) -> Any:
        episode = current_episode.get()
        source = original(self, args, *rest, **options)
        if episode is None:
            return source
        frame = enter(self, self.name, part=True)
        return stepped(frame, source, lambda _: _answered(episode, frame, rest, options))

    return run_json_stream


def _answered(episode: LiveEpisode, frame: Frame, rest: tuple[Any, ...], options: dict[str, Any]) -> None:
    """A tool's result names the last call of the agents that ran in it."""
    call_id = options.get("call_id") or (rest[1] if len(rest) > 1 else None)
    if call_id and frame.last:
        said(episode).answered(call_id, frame.last)
        frame.last = None
