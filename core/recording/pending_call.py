"""A call before its answer: who makes it, and its request."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec

from cotune.records.ids import new_id


class CallerContext(msgspec.Struct):
    """Who is about to make an LLM call. `state` is what scorers see as `call.state`.

    A framework may leave a caller's context in a copy of the ContextVars, where a reset would be lost; so `done` is a
    flag on the shared object.
    """

    role: str
    integration: str
    state: Any = None
    read: tuple[str, ...] = ()
    """Ids that name earlier outputs this call reads (LangChain message ids); resolved to parent calls."""
    output: str | None = None
    """Id under which the framework will know this call's output."""
    scope_id: Hashable = None
    """Identity of the enclosing scope that this context stands for, where it does: equal for one scope's contexts."""
    given: bool = False
    """Whether the application itself names the role (`role`, the gateway's header): nothing overrules it."""
    thread: str | None = None
    """The LangGraph thread of the node around it, where its graph has a checkpointer."""
    nameless: tuple[object, str] | None = None
    """The agent, and where it is run, where it has no name and the role is that of every such agent."""
    done: bool = False
    calls: int = 0
    """Calls that were made in this context."""


class PendingCall:
    """A chat request of one role in an episode: what is recorded of a call before anything is known of its answer."""

    __slots__ = (
        "attempts", "caller", "episode_id", "id", "messages", "model", "params", "parents", "role", "started", "step",
        "streamed", "tools", "turn",
    )  # fmt: skip

    def __init__(self, episode_id: str, caller: CallerContext, step: int, turn: int, body: Mapping[str, Any]) -> None:
        """`body` is a chat request in OpenAI form; `step` and `turn` count from 0, see `records.CallRecord`."""
        self.id = new_id()
        self.episode_id = episode_id
        self.role = caller.role
        self.caller = caller
        self.step = step
        self.turn = turn
        self.started = time.time()
        """Seconds since the epoch."""
        self.attempts: list[str] = []
        """Requests that failed before the client's retry, each as `<status>: <cause>`."""
        self.parents: tuple[str, ...] = ()
        """Calls whose outputs the messages contain: only such as had ended when this one started."""
        self._take(body)

    def _take(self, body: Mapping[str, Any]) -> None:
        self.params = dict(body)
        self.messages: list[dict[str, Any]] = list(self.params.pop("messages", None) or [])
        self.tools: list[dict[str, Any]] | None = self.params.pop("tools", None) or None
        self.model = str(self.params.pop("model", ""))
        self.streamed = bool(self.params.pop("stream", False))
