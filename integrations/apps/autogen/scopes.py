"""AutoGen: which agent, team, team manager or tool is at work, each in a scope inside the one around it.

A scope is entered for each step of the code it stands for and left right after, never across a `yield`: so it cannot
leak into the code of another agent.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from autogen_core.tools import StaticWorkbench

from cotune.integrations.apps.clients import AgentState, step_inside
from cotune.recording.app_parts import Part
from cotune.recording.call_records import CallerContext
from cotune.recording.context import Scope, current_episode, entered, innermost
from cotune.recording.recorder import LiveEpisode

NAME = "autogen"


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
class AutogenScope(Scope):
    """One agent, team, manager or tool at work. A manager or tool is a part of the scope around it."""

    owner: Any
    name: str
    outer: AutogenScope | None
    names: Names | None
    part: bool = False
    received: tuple[Any, ...] = ()
    last_output: str | None = None
    """Output id of the last call that was made in it."""

    @property
    def role(self) -> str:
        """The role of a call that is made directly in this scope."""
        if self.part:
            return f"{self.outer.role}/{self.name}" if self.outer else self.name
        return self.names.of(self.owner, self.name) if self.names else self.name

    def of(self, owner: Any) -> AutogenScope | None:
        """The innermost scope of an object, from here outwards."""
        return next((scope for scope in self._outwards() if scope.owner is owner), None)

    @property
    def team(self) -> Any:
        """The innermost team at work."""
        return next((scope.owner for scope in self._outwards() if isinstance(scope.owner, _teams())), None)

    def caller(self) -> CallerContext:
        state = AgentState(self.owner, self.team, self.received)
        return CallerContext(self.role, NAME, state=state)

    def hand_on(self) -> None:
        """Tell the team or tool around it which call its outcome comes from."""
        if self.outer is not None and self.last_output:
            self.outer.last_output = self.last_output

    def _outwards(self) -> Iterator[AutogenScope]:
        scope: AutogenScope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


def open_scope(owner: Any, name: str, *, part: bool = False, received: tuple[Any, ...] = ()) -> AutogenScope:
    """A scope inside the current one; the current one itself where it is this owner's already."""
    outer = innermost(AutogenScope)
    if outer is not None and outer.owner is owner:
        return outer
    names = outer.names if outer else None
    if names is None and isinstance(owner, (*_chat_agents(), *_teams())):
        names = Names(owner)
        _report_parts(owner, names)
        _watch_shared(names)
    return AutogenScope(owner, name, outer, names, part, received)


def in_scope(
    opened: Callable[..., AutogenScope], seen: Callable[[LiveEpisode, AutogenScope, Any, Sequence[Any], Any], None]
) -> Callable[[Any], Any]:
    """Wraps a method, async or an async generator, so that in an episode it runs in the scope that `opened` makes of
    its arguments. `seen(episode, scope, item, args, options)` gets its result, or each item."""

    def wrapper(original: Any) -> Any:
        def run(self: Any, *args: Any, **options: Any) -> Any:
            episode = current_episode.get()
            work = original(self, *args, **options)  # nothing of it runs before it is awaited or stepped
            if episode is None or not (inspect.isawaitable(work) or hasattr(work, "aclose")):
                return work
            scope = opened(self, *args, **options)

            def tell(item: Any) -> None:
                seen(episode, scope, item, args, options)

            return _awaited(scope, work, tell) if inspect.isawaitable(work) else stepped(scope, work, tell)

        return run

    return wrapper


async def _awaited(scope: AutogenScope, work: Awaitable[Any], seen: Callable[[Any], None]) -> Any:
    with entered(scope):
        result = await work
    seen(result)
    return result


def stepped(scope: AutogenScope, source: AsyncIterator[Any], seen: Callable[[Any], None]) -> AsyncGenerator[Any, None]:
    """Drive an async generator inside `scope` at each step; `seen` gets each item."""
    return step_inside(lambda: entered(scope), source, seen)


def _report_parts(root: Any, names: Names) -> None:
    """What the application is made of: agents that hold a model, and words that end its teams."""
    episode = current_episode.get()
    if episode is None or episode.parts is None:
        return
    for member in names.kept:
        if isinstance(member, _teams()):
            episode.parts.add_words(_ends(getattr(member, "_termination_condition", None)))
        elif vars(member).get("_model_client") is not None:
            episode.parts.add([Part(names.of(member, member.name), "member", root.name, member.name)])


def _watch_shared(names: Names) -> None:
    """Warn where episodes of a run share an agent or team: it keeps their messages, and runs once at a time."""
    episode = current_episode.get()
    if episode is None or episode.phase == "trace":
        return
    for member in names.kept:
        keeps = isinstance(member, _teams()) or hasattr(member, "_model_context")
        if keeps and _episodes.setdefault(member, episode.id) != episode.id:
            episode.warn(
                "shared_agent",
                "Episodes share an agent or team of AutoGen, so each reads what others have said, and a team runs only "
                "once at a time: make it in the workflow function, or give it to cotune.workflow itself.",
            )
            return


_episodes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""By agent or team: the first episode that it worked in."""


def _ends(condition: Any) -> Iterator[str]:
    """The texts that a termination condition, or one that it is made of, looks for."""
    text = getattr(condition, "_termination_text", None)
    if isinstance(text, str):
        yield text
    for inner in getattr(condition, "_conditions", ()):
        yield from _ends(inner)


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
