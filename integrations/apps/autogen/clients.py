"""AutoGen: finds the role of a call from the object that holds the model client.

Inside an episode the `_model_client` of an agent or a team's manager is a proxy that names its owner during a request.
Outside, and for every other use, it is the client itself. Agents pass each other texts without ids, so the call that a
text comes from is found by its author and its content.
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
"""Most keys that one episode remembers, and most outputs of a key. The episode of a deployed application never ends."""


class Lineage:
    """Finds the calls of one episode whose answers a message contains.

    Output ids of calls are kept by author and text of the answer, and by ids of function calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[Hashable, list[str]] = {}
        """Key of a text or a function call (`_keys`) -> ids of the outputs that have it, the newest last."""

    def add(self, source: str, content: Any, output: str) -> None:
        """Remember that the call whose output has the id `output` answered with a text, or with function calls."""
        for key in _keys(source, content):
            self._add_output(key, output)

    def answered(self, call_id: str, output: str) -> None:
        """Remember that the result of a function call came from the call whose output has the id `output`."""
        self._add_output(("call", call_id), output)

    def _add_output(self, key: Hashable, output: str) -> None:
        """Remember that the output with the id `output` has the text or function call of this key.

        The oldest outputs of the key, and the oldest keys, are dropped beyond the limit.
        """
        with self._lock:
            outputs = self._outputs.setdefault(key, [])
            # The newest two are compared because one answer is reported more than once, by the call and by the agent.
            if output not in outputs[-2:]:
                outputs.append(output)
            del outputs[:-_MOST]
            # A dict keeps its insertion order, so the first key is the oldest.
            if len(self._outputs) > _MOST:
                del self._outputs[next(iter(self._outputs))]

    def read(self, messages: Sequence[Any]) -> tuple[str, ...]:
        """The ids of earlier outputs that the messages of a request contain, in the order of the messages.

        If several outputs have the same text, and the messages contain it `n` times, the newest `n` outputs are
        returned.
        """
        counts: Counter[Any] = Counter()
        for message in messages:
            counts.update(_keys_of(message))
        outputs_read: dict[str, None] = {}  # a set that keeps the order
        for key, count in counts.items():
            outputs: Sequence[str] = self._outputs.get(key, ())
            # The id of a function call is unique. Its outputs are the call that asks for the function, and the calls
            # that its result comes from: all are read.
            if key[0] != "call":
                outputs = outputs[-count:]
            outputs_read.update(dict.fromkeys(outputs))
        return tuple(outputs_read)


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
    """The lineage of an episode's calls."""
    lineage: Lineage = episode.notes.setdefault(NAME, Lineage())
    return lineage


class AgentClient(Proxy):
    """A model client whose calls have the role of its owner, an agent or a team's manager."""

    __slots__ = ()

    async def create(self, messages: Any, *args: Any, **options: Any) -> Any:
        """Ask the client for an answer, with the owner's role."""
        episode = current_episode.get()
        if episode is None:
            return await self._cotune_inner.create(messages, *args, **options)
        caller = _caller(episode, self._cotune_owner, messages)
        try:
            with called_by(caller):
                result = await self._cotune_inner.create(messages, *args, **options)
        finally:
            caller.done = True
        _remember_answer(episode, self._cotune_owner, caller, result)
        return result

    async def create_stream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Ask the client for a streamed answer, with the owner's role."""
        source = self._cotune_inner.create_stream(messages, *args, **options)
        episode = current_episode.get()
        caller = CallerContext("app", NAME)  # outside of an episode nothing is recorded, so the role does not matter
        if episode is not None:
            caller = _caller(episode, self._cotune_owner, messages)
        # Between two steps of the stream the application's own code runs, whose calls are not the owner's.
        async with aclosing(step_inside(lambda: called_by(caller), source)) as parts:
            try:
                async for part in parts:
                    if episode is not None and isinstance(part, CreateResult):
                        _remember_answer(episode, self._cotune_owner, caller, part)
                    yield part
            finally:
                caller.done = True


class ClientAttribute:
    """The attribute `_model_client`. It is read as a proxy inside an episode; the object stores the client itself."""

    def __get__(self, owner: Any, cls: type) -> Any:
        """Return the client, or inside an episode a proxy that makes `owner` the caller of its calls."""
        if owner is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute '_model_client'")
        attributes = vars(owner)
        client = attributes["_model_client"] if "_model_client" in attributes else self._of_class(owner)
        if current_episode.get() is None or not isinstance(client, ChatCompletionClient):
            return client
        return AgentClient(client, owner)

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)["_model_client"] = unwrapped(value)

    def __delete__(self, owner: Any) -> None:
        if vars(owner).pop("_model_client", self) is self:
            raise AttributeError("_model_client")

    def _of_class(self, owner: Any) -> Any:
        for cls in type(owner).__mro__:
            attribute = cls.__dict__.get("_model_client", self)
            if not isinstance(attribute, ClientAttribute):
                return attribute
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute '_model_client'")


def _caller(episode: LiveEpisode, owner: Any, messages: Any) -> CallerContext:
    """The caller of a request by `owner`, an agent or a team's manager: its role, the messages that it has received,
    and the ids of the earlier answers that `messages`, the request's, contain.
    """
    scope = innermost(AutogenScope)
    # AutoGen's objects may be of another version. An error here must not stop the application.
    try:
        owner_scope = scope.of(owner) if scope else None
        if owner_scope is not None:
            role = owner_scope.role
            received = owner_scope.received
        else:
            role = _role_outside_scope(owner, scope.names if scope else None)
            received = ()
        team_messages = []
        team_thread = getattr(owner, "_message_thread", None)
        if team_thread is not None:
            # The manager of a team gets all messages of the team, and makes a prompt of its own from them.
            received = tuple(team_thread)
            team_messages = [m.to_model_message() for m in team_thread if hasattr(m, "to_model_message")]
        state = AgentState(owner, scope.team if scope else None, received, tuple(messages))
        read = lineage_of(episode).read([*team_messages, *messages])
        return CallerContext(role, NAME, state=state, read=read, output=new_id())
    except Exception as error:  # noqa: BLE001
        episode.warn("autogen", "The AutoGen integration could not find the messages that a call reads.", error)
        return CallerContext(str(getattr(owner, "name", "app")), NAME)


def _role_outside_scope(owner: Any, names: Names | None) -> str:
    """The role of an object that makes a call outside of its scope."""
    if isinstance(owner, BaseAgent):
        return str(owner.id.type)
    return names.of(owner, owner.name) if names else str(owner.name)


def _remember_answer(episode: LiveEpisode, owner: Any, caller: CallerContext, result: Any) -> None:
    """Remember the answer of a call, to recognize it in the messages of later calls. Warns if the call was not
    recorded.
    """
    if not caller.calls:
        episode.warn(
            "unseen_call",
            f"A model client answered role {caller.role!r} without a call that can be recorded: from a cache or by a "
            "client of its own. Switch the cache off while recording.",
        )
        return
    if caller.output is None:
        return  # the caller's messages could not be read, so the answer has no id
    source = getattr(owner, "name", None) or getattr(owner, "_name", "")
    lineage_of(episode).add(str(source), getattr(result, "content", None), caller.output)
    scope = innermost(AutogenScope)
    owner_scope = scope.of(owner) if scope else None
    if owner_scope is not None:
        owner_scope.last_output = caller.output
