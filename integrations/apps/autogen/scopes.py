"""AutoGen: tracks the agents, teams, team managers and tools at work. Each has a scope inside the scope around it.

The code of an agent runs in steps and yields after each. Its scope is entered for each step and left after it, so it
cannot leak into the code of another agent.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autogen_core.tools import StaticWorkbench

from cotune.integrations.apps.clients import AgentState, step_inside
from cotune.integrations.apps.shared_objects import was_used_by_another
from cotune.recording.app_parts import Part
from cotune.recording.call_records import CallerContext
from cotune.recording.context import Scope, current_episode, entered, innermost
from cotune.recording.recorder import LiveEpisode

NAME = "autogen"
Report = Callable[[LiveEpisode, "AutogenScope", Any, Sequence[Any], dict[str, Any]], None]
"""Notes a result of an agent or a tool, from the episode, the scope, the result, and the arguments of the method."""


class Names:
    """Labels of the agents and teams of one application: the name, or the path if several share the name."""

    def __init__(self, root: Any) -> None:
        """Label all members of the application whose outermost agent or team is `root`."""
        paths_and_members = list(_members_with_paths(root))
        self.members = [member for _, member in paths_and_members]
        """All members. The references also keep Python from reusing their ids, which are the keys below."""
        # An agent and a team with the same name stay apart, so they may share it.
        members_of_name = Counter(_kind_and_name(member) for member in self.members if _makes_calls(member))
        self._labels: dict[int, str] = {}
        for path, member in paths_and_members:
            path_below_root = path[1:]
            shares_name = members_of_name[_kind_and_name(member)] > 1
            if shares_name and path_below_root:
                self._labels[id(member)] = "/".join(path_below_root)
            else:
                self._labels[id(member)] = path[-1]

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
        """Pass the id of the call that its outcome comes from to the team or tool around it."""
        if self.outer is not None and self.last_output:
            self.outer.last_output = self.last_output

    def _outwards(self) -> Iterator[AutogenScope]:
        scope: AutogenScope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


def open_scope(owner: Any, name: str, *, part: bool = False, received: tuple[Any, ...] = ()) -> AutogenScope:
    """The scope of `owner`, an agent, a team, a manager or a tool that starts to work, inside the current scope.

    Returns the current scope if it belongs to this owner already. A `part` is named after the role around it.
    `received` are the messages that an agent received.
    """
    outer = innermost(AutogenScope)
    if outer is not None and outer.owner is owner:
        return outer
    names = outer.names if outer else None
    if names is None and isinstance(owner, (*_chat_agents(), *_teams())):
        # The outermost agent or team labels all members of the application.
        names = Names(owner)
        _report_parts(owner, names)
        _watch_shared(names)
    return AutogenScope(owner, name, outer, names, part, received)


def in_scope(scope_of: Callable[..., AutogenScope], report: Report, original: Any) -> Any:
    """Wrap a method that runs an agent or a tool, a coroutine or an async generator.

    In an episode it runs inside the scope `scope_of(self, *args, **options)`, so that its calls get the role of the
    scope. `report` gets the result of a coroutine, or each item of a generator.
    """

    def run(self: Any, *args: Any, **options: Any) -> Any:
        """Run the method inside its scope. Outside of an episode, it runs as before."""
        episode = current_episode.get()
        # This only creates the coroutine or the generator: its code runs later, inside the scope.
        coroutine_or_generator = original(self, *args, **options)
        is_coroutine = inspect.isawaitable(coroutine_or_generator)
        is_generator = hasattr(coroutine_or_generator, "aclose")
        if episode is None or not (is_coroutine or is_generator):
            return coroutine_or_generator
        scope = scope_of(self, *args, **options)

        def report_item(item: Any) -> None:
            report(episode, scope, item, args, options)

        if is_coroutine:
            return _await_in_scope(scope, coroutine_or_generator, report_item)
        return step_in_scope(scope, coroutine_or_generator, report_item)

    return run


async def _await_in_scope(scope: AutogenScope, work: Awaitable[Any], report: Callable[[Any], None]) -> Any:
    with entered(scope):
        result = await work
    report(result)
    return result


def step_in_scope(
    scope: AutogenScope, source: AsyncIterator[Any], report: Callable[[Any], None]
) -> AsyncGenerator[Any, None]:
    """Run each step of an async generator inside `scope`; `report` gets each item."""
    return step_inside(lambda: entered(scope), source, report)


def _report_parts(root: Any, names: Names) -> None:
    """Report the parts of the application to `cotune check`, which names parts that never run: agents with a model, and
    the words that an agent can end its team with.
    """
    episode = current_episode.get()
    if episode is None or episode.parts is None:
        return
    for member in names.members:
        if isinstance(member, _teams()):
            episode.parts.add_words(_termination_texts(getattr(member, "_termination_condition", None)))
        elif vars(member).get("_model_client") is not None:
            episode.parts.add([Part(names.of(member, member.name), "member", root.name, member.name)])


def _watch_shared(names: Names) -> None:
    """Warn of episodes that share an agent or team: it keeps their messages, and a team runs only once at a time."""
    episode = current_episode.get()
    if episode is None or episode.phase == "trace":
        return
    for member in names.members:
        has_state = isinstance(member, _teams()) or hasattr(member, "_model_context")
        if has_state and was_used_by_another(member, episode.id):
            episode.warn(
                "shared_agent",
                "Episodes share an agent or team of AutoGen, so each reads what others have said, and a team runs only "
                "once at a time: make it in the workflow function, or give it to cotune.workflow itself.",
            )
            return


def _termination_texts(condition: Any) -> Iterator[str]:
    """The texts that a termination condition, or a part of it, looks for."""
    text = getattr(condition, "_termination_text", None)
    if isinstance(text, str):
        yield text
    for inner in getattr(condition, "_conditions", ()):
        yield from _termination_texts(inner)


def _members_with_paths(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """An application's agents and teams with their paths, breadth first, each object once."""
    queue: list[tuple[tuple[str, ...], Any]] = [((root.name,), root)]
    visited = {id(root)}
    for path, member in queue:
        yield path, member
        for inner in _inner_members(member):
            if id(inner) not in visited:
                visited.add(id(inner))
                queue.append(((*path, inner.name), inner))


def _inner_members(member: Any) -> Iterator[Any]:
    """The agents and teams that an agent or team contains: its participants, its inner team, the agent that it wraps,
    and the agents and teams that its tools wrap.
    """
    if not hasattr(member, "__dict__"):
        return
    # They are attributes, or items of attributes that are lists.
    objects = list(vars(member).values())
    for value in vars(member).values():
        if isinstance(value, list | tuple):
            objects += value
    # A workbench holds tools, and a tool may run an agent or a team.
    objects_in_tools = []
    for value in objects:
        if isinstance(value, StaticWorkbench):
            objects_in_tools += [getattr(tool, "_task_runner", None) for tool in value._tools]
    for value in [*objects, *objects_in_tools]:
        if isinstance(value, (*_chat_agents(), *_teams())):
            yield value


def _kind_and_name(member: Any) -> tuple[bool, str]:
    return isinstance(member, _teams()), member.name


def _makes_calls(member: Any) -> bool:
    """Whether it may make calls itself; a wrapper around other agents does not."""
    return (
        isinstance(member, _teams()) or vars(member).get("_model_client") is not None or not any(_inner_members(member))
    )


def _chat_agents() -> tuple[type, ...]:
    """Agentchat's class of agents; empty if the application has not loaded agentchat."""
    return _agentchat_class("ChatAgent")


def _teams() -> tuple[type, ...]:
    return _agentchat_class("Team")


def _agentchat_class(name: str) -> tuple[type, ...]:
    cls = getattr(sys.modules.get("autogen_agentchat.base"), name, None)
    return () if cls is None else (cls,)
