"""What the tools of an episode returned, so that a replay can give it again instead of running them."""

from __future__ import annotations

import copy
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec

from cotune.records.ids import address
from cotune.records.structs import Message, ToolResult
from cotune.runtime.user_code import setting


def _shown(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else f"<{type(value).__name__}>"


_canonical = msgspec.json.Encoder(order="sorted", enc_hook=_shown).encode
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class ToolUse:
    """One use of a tool; `arguments` is a digest. `known` says whether `value` is given from the record."""

    __slots__ = ("arguments", "calls", "known", "name", "value")

    def __init__(self, name: str, arguments: str, known: bool = False, value: Any = None) -> None:
        self.name = name
        self.arguments = arguments
        self.known = known
        self.value = value
        self.calls = 0
        """Model calls that were made in it."""


class ToolAtWork(NamedTuple):
    """The tool that runs around this point."""

    use: ToolUse | None = None
    answered_call: str = ""
    """Id of the tool call that it answers, if the framework says so."""


tool_at_work: ContextVar[ToolAtWork] = ContextVar("cotune_tool", default=ToolAtWork())  # noqa: B039  # a tuple


class Given(msgspec.Struct, frozen=True):
    """A recorded result: of a tool with these arguments (a digest), begun at `started` (seconds since the epoch), and
    `latency` seconds later there. `call` is the tool call that it answers."""

    name: str
    arguments: str
    started: float
    value: Any
    latency: float = 0.0
    call: str = ""


class Tape:
    """The tool results of one episode; safe from any thread."""

    def __init__(self) -> None:
        self.frameworks = False
        """Whether the results of a framework's tools are kept and given too, not only those of `cotune.recorded`."""
        self.keeps = True
        """Whether results are kept at all; not in an episode without an end."""
        self._lock = threading.Lock()
        self._kept: list[Given] = []
        self._given: dict[tuple[str, str], deque[Given]] = {}

    def give(self, results: Sequence[Given]) -> None:
        """Give these results again, to the same tool with the same arguments, in the order in which they were asked."""
        for one in sorted(results, key=lambda one: one.started):
            self._given.setdefault((one.name, one.arguments), deque()).append(one)

    @contextmanager
    def using(self, name: str, arguments: Any) -> Iterator[ToolUse]:
        """A use of a tool; within it the model calls that it makes are counted."""
        digest = _digest(arguments)
        with self._lock:
            queue = self._given.get((name, digest))
            given = queue.popleft() if queue else None
        # A copy: all branches of an episode are given the same, and applications change their copies.
        use = ToolUse(name, digest) if given is None else ToolUse(name, digest, True, copy.deepcopy(given.value))
        with setting(tool_at_work, tool_at_work.get()._replace(use=use)):
            yield use

    def keep(self, use: ToolUse, started: float, latency: float) -> bool:
        """Keep the result of a use, which took `latency` seconds; False for one that is no JSON.

        The result of a tool that made model calls, as an agent does, is not kept: the calls are repeated themselves.
        """
        if use.calls or not self.keeps:
            return True
        try:
            value = msgspec.json.decode(msgspec.json.encode(use.value))
        except (TypeError, ValueError, RecursionError):
            return False
        if value != use.value:
            return False
        with self._lock:
            self._kept.append(Given(use.name, use.arguments, started, value, latency, tool_at_work.get().answered_call))
        return True

    def records(
        self, changes: Callable[[Mapping[str, Any]], bool] | None
    ) -> tuple[list[Message], tuple[ToolResult, ...]]:
        """What to store: the results as messages, and where each belongs; not those that a redactor `changes`."""
        bodies: list[Message] = []
        results = []
        for one in self._kept:
            if changes is not None and changes({"role": "tool", "content": one.value}):
                continue
            body = Message(address(_canonical({"result": one.value})), {"result": one.value})
            bodies.append(body)
            results.append(ToolResult(one.name, one.arguments, one.started, body.id, one.latency, one.call))
        return bodies, tuple(results)


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any], without: Sequence[str] = ()) -> list[Any]:
    """The arguments of a call as one value; arguments that JSON cannot hold are named by their type."""
    return [list(args), {name: value for name, value in kwargs.items() if name not in without}]


def _digest(arguments: Any) -> str:
    """A digest that tells two uses apart: of the arguments as JSON, or of their `repr` if JSON cannot hold them."""
    try:
        return address(_canonical(arguments))
    except Exception:  # noqa: BLE001  # a tool of the application's must run whatever it takes
        return address(_ADDRESS.sub("", ascii(arguments)).encode())
