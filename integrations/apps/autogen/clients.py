"""AutoGen: who makes a call, by the object that holds the model client.

Inside an episode the `_model_client` of an agent or a team's manager is a proxy that names its owner while a request is
made. Outside, and for every other use, it is the client itself. Agents pass each other texts
without ids, so which call a text is from goes by who wrote it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from autogen_core import BaseAgent, FunctionCall
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResultMessage,
    UserMessage,
)

from cotune.integrations.apps.autogen.scopes import NAME, AutogenScope, Names
from cotune.integrations.apps.clients import AgentState, Proxy, step_inside, unwrapped
from cotune.recording.call_records import CallerContext
from cotune.recording.context import called_by, current_episode, innermost
from cotune.recording.recorder import LiveEpisode
from cotune.records.ids import new_id

_MOST = 10_000
"""Most texts that are kept of one episode: a deployed application is one without an end."""


class Lineage:
    """Output ids of one episode's calls, by the source and the text of an answer, or by the id of a function call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[Hashable, list[str]] = {}

    def add(self, source: str, content: Any, output: str) -> None:
        """The call with this output answered with a text, or asked for function calls."""
        for key in _keys(source, content):
            self._add(key, output)

    def answered(self, call_id: str, output: str) -> None:
        """The result of a function call came from the call with this output."""
        self._add(("call", call_id), output)

    def _add(self, key: Hashable, output: str) -> None:
        with self._lock:
            known = self._outputs.setdefault(key, [])
            if output not in known[-2:]:
                known.append(output)
            del known[:-_MOST]
            if len(self._outputs) > _MOST:
                del self._outputs[next(iter(self._outputs))]

    def read(self, messages: Sequence[Any]) -> tuple[str, ...]:
        """Outputs that LLM messages contain; of equal answers the newest, as many as there are in the messages."""
        counts: Counter[Any] = Counter(key for message in messages for key in _keys_of(message))
        found: dict[str, None] = {}
        for key, count in counts.items():
            # A function call and its result name the call that asked, and the calls that answered it.
            most = 0 if key[0] == "call" else count
            found.update(dict.fromkeys(self._outputs.get(key, ())[-most:]))
        return tuple(found)


def _keys_of(message: Any) -> Iterator[Hashable]:
    if isinstance(message, FunctionExecutionResultMessage):
        yield from (("call", result.call_id) for result in message.content)
    elif isinstance(message, UserMessage | AssistantMessage):
        yield from _keys(message.source, message.content)


def _keys(source: str, content: Any) -> Iterator[Hashable]:
    if isinstance(content, str):
        yield "text", source, content
    elif isinstance(content, list):
        yield from (("call", part.id) for part in content if isinstance(part, FunctionCall))


def lineage_of(episode: LiveEpisode) -> Lineage:
    """Which call of an episode an answer is from."""
    lineage: Lineage = episode.notes.setdefault(NAME, Lineage())
    return lineage


class AgentClient(Proxy):
    """A model client that asks in the name of its owner, an agent or a team's manager."""

    __slots__ = ()

    async def create(self, messages: Any, *args: Any, **options: Any) -> Any:
        """Ask the client for an answer, in the owner's name."""
        episode = current_episode.get()
        if episode is None:
            return await self._cotune_inner.create(messages, *args, **options)
        caller = _caller(episode, self._cotune_owner, messages)
        try:
            with called_by(caller):
                result = await self._cotune_inner.create(messages, *args, **options)
        finally:
            caller.done = True
        _has_answered(episode, self._cotune_owner, caller, result)
        return result

    async def create_stream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Ask the client for a streamed answer, in the owner's name at each step."""
        source = self._cotune_inner.create_stream(messages, *args, **options)
        episode = current_episode.get()
        caller = CallerContext("app", NAME) if episode is None else _caller(episode, self._cotune_owner, messages)
        async with aclosing(step_inside(lambda: called_by(caller), source)) as parts:
            try:
                async for part in parts:
                    if episode is not None and isinstance(part, CreateResult):
                        _has_answered(episode, self._cotune_owner, caller, part)
                    yield part
            finally:
                caller.done = True


class ClientAttribute:
    """The attribute `_model_client`, as a proxy inside an episode; stored in the object as ever."""

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute '_model_client'")
        held = vars(owner)
        found = held["_model_client"] if "_model_client" in held else self._of_class(owner)
        if current_episode.get() is None or not isinstance(found, ChatCompletionClient):
            return found
        return AgentClient(found, owner)

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)["_model_client"] = unwrapped(value)

    def __delete__(self, owner: Any) -> None:
        if vars(owner).pop("_model_client", self) is self:
            raise AttributeError("_model_client")

    def _of_class(self, owner: Any) -> Any:
        for cls in type(owner).__mro__:
            found = cls.__dict__.get("_model_client", self)
            if not isinstance(found, ClientAttribute):
                return found
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute '_model_client'")


def _caller(episode: LiveEpisode, owner: Any, messages: Any) -> CallerContext:
    scope = innermost(AutogenScope)
    try:
        own = scope.of(owner) if scope else None
        role = own.role if own else _name(owner, scope.names if scope else None)
        thread = getattr(owner, "_message_thread", None)
        received = tuple(thread or ()) if thread is not None else (own.received if own else ())
        state = AgentState(owner, scope.team if scope else None, received, tuple(messages))
        earlier = [message.to_model_message() for message in thread or () if hasattr(message, "to_model_message")]
        read = lineage_of(episode).read([*earlier, *messages])
        return CallerContext(role, NAME, state=state, read=read, output=new_id())
    except Exception as error:  # noqa: BLE001
        episode.warn("autogen", "The AutoGen integration could not find the messages that a call reads.", error)
        return CallerContext(str(getattr(owner, "name", "app")), NAME)


def _name(owner: Any, names: Names | None) -> str:
    """The role of an object that makes a call outside any scope of its own."""
    if isinstance(owner, BaseAgent):
        return str(owner.id.type)
    return names.of(owner, owner.name) if names else str(owner.name)


def _has_answered(episode: LiveEpisode, owner: Any, caller: CallerContext, result: Any) -> None:
    """Keep the answer of a call for the calls that will read it."""
    if not caller.calls:
        episode.warn(
            "unseen_call",
            f"A model client answered role {caller.role!r} without a call that can be recorded: from a cache or by a "
            "client of its own. Switch the cache off while recording.",
        )
    if caller.output is None or not caller.calls:
        return
    source = getattr(owner, "name", None) or getattr(owner, "_name", "")
    lineage_of(episode).add(str(source), getattr(result, "content", None), caller.output)
    scope = innermost(AutogenScope)
    own = scope.of(owner) if scope else None
    if own is not None:
        own.last_output = caller.output
