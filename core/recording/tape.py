"""The results of an episode's tools, so that a replay can return them again instead of running the tools."""

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
from cotune.runtime.user_code import context_value


def _json_form(value: Any) -> Any:
    """A form for a value that JSON cannot hold: the fields of a pydantic model, else the name of its type."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return f"<{type(value).__name__}>"


_canonical = msgspec.json.Encoder(order="sorted", enc_hook=_json_form).encode
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class ToolUse:
    """One use of a tool. `arguments` is a digest; `known` is whether `value` comes from the record."""

    __slots__ = ("arguments", "calls", "known", "name", "value")

    def __init__(self, name: str, arguments: str, known: bool = False, value: Any = None) -> None:
        """`arguments` is a digest of the tool's arguments. `known` is whether `value` is the result from the record;
        otherwise the tool runs and sets it."""
        self.name = name
        self.arguments = arguments
        self.known = known
        self.value = value
        self.calls = 0
        """Number of model calls that the tool made."""


class ToolAtWork(NamedTuple):
    """The tool that runs around this point."""

    use: ToolUse | None = None
    answered_call: str = ""
    """Id of the tool call that it answers, if the framework says so."""


tool_at_work: ContextVar[ToolAtWork] = ContextVar("cotune_tool", default=ToolAtWork())  # noqa: B039  # a tuple


class RecordedResult(msgspec.Struct, frozen=True):
    """A recorded result of a tool with these arguments (a digest). The use began at `started` (seconds since the epoch)
    and took `latency` seconds. `call` is the tool call that it answers."""

    name: str
    arguments: str
    started: float
    value: Any
    latency: float = 0.0
    call: str = ""


class Tape:
    """The tool results of one episode; safe from any thread."""

    def __init__(self) -> None:
        """An empty record of the results of tools, for one episode."""
        self.frameworks = False
        """Whether the results of a framework's tools are recorded and returned too, not only of `cotune.recorded`."""
        self.records_results = True
        """Whether results are recorded at all. They are not in an episode without an end."""
        self._lock = threading.Lock()
        self._new_results: list[RecordedResult] = []  # new results, to record
        self._recorded_results: dict[tuple[str, str], deque[RecordedResult]] = {}
        """The results to return again, by tool and arguments."""

    def set_recorded(self, results: Sequence[RecordedResult]) -> None:
        """Return these results again to the same tool with the same arguments, in the order of their starts."""
        for result in sorted(results, key=lambda result: result.started):
            self._recorded_results.setdefault((result.name, result.arguments), deque()).append(result)

    @contextmanager
    def use_tool(self, name: str, arguments: Any) -> Iterator[ToolUse]:
        """A block that uses a tool. Yields the use, which has the recorded result if the tool has one for these
        arguments, and which counts the model calls that the tool makes."""
        digest = _digest(arguments)
        with self._lock:
            queue = self._recorded_results.get((name, digest))
            recorded = queue.popleft() if queue else None
        use = ToolUse(name, digest)
        if recorded is not None:
            # A copy: all branches of an episode get the same value, and applications may change it.
            use = ToolUse(name, digest, known=True, value=copy.deepcopy(recorded.value))
        with context_value(tool_at_work, tool_at_work.get()._replace(use=use)):
            yield use

    def record_result(self, use: ToolUse, started: float, latency: float) -> bool:
        """Record the result of a use, which took `latency` seconds. Returns False if the result is not JSON.

        The result of a tool that made model calls, like an agent, is not recorded: a replay repeats its calls.
        """
        if use.calls or not self.records_results:
            return True
        try:
            value = msgspec.json.decode(msgspec.json.encode(use.value))
        except (TypeError, ValueError, RecursionError):  # no JSON can hold the value
            return False
        if value != use.value:  # JSON would change it, for example a tuple to a list
            return False
        tool_call_id = tool_at_work.get().answered_call  # of the model's request to use the tool, if it is known
        result = RecordedResult(use.name, use.arguments, started, value, latency, tool_call_id)
        with self._lock:
            self._new_results.append(result)
        return True

    def records(
        self, is_changed_by_redactor: Callable[[Mapping[str, Any]], bool] | None
    ) -> tuple[list[Message], tuple[ToolResult, ...]]:
        """The records of all new results: their values as messages, and a `ToolResult` for each, which refers to its
        message.

        A result that a redactor changes is left out, because a replay could not return the original value. Redactors
        see it as the content of a message. None: there is no redactor.
        """
        bodies: list[Message] = []
        tool_results: list[ToolResult] = []
        for result in self._new_results:
            shown = {"role": "tool", "content": result.value}
            if is_changed_by_redactor is not None and is_changed_by_redactor(shown):
                continue
            value = {"result": result.value}
            body = Message(address(_canonical(value)), value)
            bodies.append(body)
            tool_results.append(
                ToolResult(result.name, result.arguments, result.started, body.id, result.latency, result.call)
            )
        return bodies, tuple(tool_results)


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any], without: Sequence[str] = ()) -> list[Any]:
    """The arguments of a call as one value. Arguments that JSON cannot hold are replaced with the name of their
    type."""
    return [list(args), {name: value for name, value in kwargs.items() if name not in without}]


def _digest(arguments: Any) -> str:
    """A digest that identifies the arguments of a use: of their JSON, or of their `repr` if JSON cannot hold them."""
    try:
        return address(_canonical(arguments))
    except Exception:  # noqa: BLE001  # the application's tool must run with any arguments
        return address(_ADDRESS.sub("", ascii(arguments)).encode())
