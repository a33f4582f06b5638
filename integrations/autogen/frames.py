"""AutoGen: what runs inside what. A frame is one agent, team, team manager or tool at work; frames form a stack.

A frame is set for each step of the code it stands for and reset right after, never across a `yield`: so it cannot
leak into the code of another agent.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from autogen_core.tools import StaticWorkbench

from cotune.context import current_caller, current_episode, opened_call, scope_ids_around, scopes
from cotune.recording.app_parts import Part
from cotune.recording.pending_call import CallerContext


@dataclass(frozen=True)
class AgentState:
    """What scorers see as `call.state` of a call that AutoGen makes. The objects are live, and the application's."""

    agent: Any
    """The agent that makes the call, or the manager of a team (its selector, its orchestrator)."""
    team: Any
    """The innermost team at work; None for an agent that runs alone."""
    received: tuple[Any, ...]
    """Chat messages that the agent was given for this turn; for a manager the thread of its team."""
    prompt: tuple[Any, ...]
    """The LLM messages of this call, as the agent passes them to its model client."""


class Names:
    """How the members of one application are called: by name, or by path where several share the name."""

    def __init__(self, root: Any) -> None:
        found = list(_members(root))
        counts = Counter(_kind(member) for _, member in found if _speaks(member))
        self.kept = [member for _, member in found]
        """Keeps the ids below from being given to other objects."""
        self._labels = {
            id(member): "/".join(path[1:]) if counts[_kind(member)] > 1 and len(path) > 1 else path[-1]
            for path, member in found
        }

    def of(self, member: Any, name: str) -> str:
        """The label of a member; the plain name of an object that was not part of the application from the start."""
        return self._labels.get(id(member), name)


@dataclass(slots=True, eq=False)
class Frame:
    """One agent, team, manager or tool at work. A manager or tool is a part of what is around it."""

    owner: Any
    name: str
    outer: Frame | None
    names: Names | None
    part: bool = False
    received: tuple[Any, ...] = ()
    last: str | None = None
    """Output id of the last call that was made in it."""
    around: tuple[Any, ...] = ()
    """Units of other frameworks' scopes that the frame was entered in."""

    @property
    def role(self) -> str:
        """The role of a call that is made directly in this frame."""
        if self.part:
            return f"{self.outer.role}/{self.name}" if self.outer else self.name
        return self.names.of(self.owner, self.name) if self.names else self.name

    def of(self, owner: Any) -> Frame | None:
        """The innermost frame of an object, from here outwards."""
        frame: Frame | None = self
        while frame is not None and frame.owner is not owner:
            frame = frame.outer
        return frame

    @property
    def team(self) -> Any:
        """The innermost team at work."""
        frame: Frame | None = self
        while frame is not None and not isinstance(frame.owner, _teams()):
            frame = frame.outer
        return frame.owner if frame else None


NAME = "autogen"
current_frame: ContextVar[Frame | None] = ContextVar("cotune_autogen_frame", default=None)


def enter(owner: Any, name: str, *, part: bool = False, received: tuple[Any, ...] = ()) -> Frame:
    """A frame inside the current one; the current one itself where it is this owner's already."""
    outer = current_frame.get()
    if outer is not None and outer.owner is owner:
        return outer
    names = outer.names if outer else None
    if names is None and isinstance(owner, (*_chat_agents(), *_teams())):
        names = Names(owner)
        _tell(owner, names)
    return Frame(owner, name, outer, names, part, received, around=tuple(scope_ids_around(scope)))


def _tell(root: Any, names: Names) -> None:
    """What the application is made of: agents that hold a model, and words that end its teams."""
    episode = current_episode.get()
    if episode is None or episode.parts is None:
        return
    for member in names.kept:
        if isinstance(member, _teams()):
            episode.parts.say(_ends(getattr(member, "_termination_condition", None)))
        elif vars(member).get("_model_client") is not None:
            episode.parts.tell([Part(names.of(member, member.name), "member", root.name, member.name)])


def _ends(condition: Any) -> Iterator[str]:
    """The texts that a termination condition, or one that it is made of, looks for."""
    text = getattr(condition, "_termination_text", None)
    if isinstance(text, str):
        yield text
    for inner in getattr(condition, "_conditions", ()):
        yield from _ends(inner)


@contextmanager
def within(frame: Frame) -> Iterator[None]:
    """Make a frame the current one, for code that does not yield; a call that goes on around it is not its own."""
    tokens = current_frame.set(frame), current_caller.set(None), opened_call.set(None)
    try:
        yield
    finally:
        opened_call.reset(tokens[2])
        current_caller.reset(tokens[1])
        current_frame.reset(tokens[0])


def scope() -> CallerContext | None:
    """The current frame, for a call that no model client's owner announces; None where a scope of another framework
    was entered within it."""
    frame = current_frame.get()
    if frame is None or any(unit not in frame.around for unit in scope_ids_around(scope)):
        return None
    return CallerContext(
        frame.role, NAME, state=AgentState(frame.owner, frame.team, frame.received, ()), scope_id=id(frame)
    )


def listen() -> None:
    """From now on the current frame names the calls in it."""
    if scope not in scopes:
        scopes.insert(0, scope)


def hand_on(frame: Frame) -> None:
    """Tell the team or tool around a frame which call its outcome comes from."""
    if frame.outer is not None and frame.last:
        frame.outer.last = frame.last


async def stepped(frame: Frame, source: AsyncIterator[Any], ended: Callable[[Any], None]) -> AsyncIterator[Any]:
    """Drive an async generator with `frame` set during its steps only; `ended` sees each item."""
    try:
        while True:
            with within(frame):
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            ended(item)
            yield item
    finally:
        with within(frame):
            await source.aclose()  # type: ignore[attr-defined]


def _members(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """An application's agents and teams with their paths, nearest first, each object once."""
    queue: list[tuple[tuple[str, ...], Any]] = [((root.name,), root)]
    seen = {id(root)}
    for path, member in queue:
        yield path, member
        for inner in _inner(member):
            if id(inner) not in seen:
                seen.add(id(inner))
                queue.append(((*path, inner.name), inner))


def _inner(member: Any) -> Iterator[Any]:
    """The agents and teams that an agent or team holds: participants, an inner team, a wrapped agent, tools."""
    held = list(vars(member).values()) if hasattr(member, "__dict__") else []
    held += [item for value in held if isinstance(value, list | tuple) for item in value]
    tools = [tool for value in held if isinstance(value, StaticWorkbench) for tool in value._tools]
    for value in [*held, *(getattr(tool, "_task_runner", None) for tool in tools)]:
        if isinstance(value, (*_chat_agents(), *_teams())):
            yield value


def _kind(member: Any) -> tuple[bool, str]:
    return isinstance(member, _teams()), member.name


def _speaks(member: Any) -> bool:
    """Whether it may make calls of its own: a wrapper around other agents does not."""
    return isinstance(member, _teams()) or vars(member).get("_model_client") is not None or not any(_inner(member))


def _chat_agents() -> tuple[type, ...]:
    """Agentchat's class of agents, where the application has loaded agentchat."""
    return _of_agentchat("ChatAgent")


def _teams() -> tuple[type, ...]:
    return _of_agentchat("Team")


def _of_agentchat(name: str) -> tuple[type, ...]:
    found = getattr(sys.modules.get("autogen_agentchat.base"), name, None)
    return () if found is None else (found,)
