"""AutoGen: which call an answer is from. Agents pass each other texts without ids, so a text goes by who wrote it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from autogen_core import FunctionCall
from autogen_core.models import AssistantMessage, FunctionExecutionResultMessage, UserMessage

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
