"""Outputs of one episode: which call said what, so that a prompt tells which calls it has read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from cotune.ids import message_id

_SHORT = 512
"""Characters from which on a text is remembered by its digest."""


class Outputs:
    """Answers of the calls that have ended. Not thread-safe: the episode's lock guards it."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, str] = {}

    def add(self, call: str, message: Mapping[str, Any], name: str | None) -> None:
        """Remember what a call said, also under the `name` that a framework gives it."""
        if name:
            self._calls[name] = call
        self._calls[_said(message)] = call

    def read_by(self, names: Iterable[str], messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Calls whose outputs a prompt contains: by the framework's names, else by what its messages say."""
        if not self._calls:
            return ()
        found: dict[str, None] = {}
        for name in names:
            if name in self._calls:
                found[self._calls[name]] = None
        if not found:
            for message in messages:
                if message.get("role") == "assistant" and (call := self._calls.get(_said(message))):
                    found[call] = None
        return tuple(found)


def _said(message: Mapping[str, Any]) -> Hashable:
    """What an assistant message says, whatever optional fields a client adds or drops on the way."""
    content, tools = message.get("content") or None, message.get("tool_calls")
    if not tools and (content is None or (isinstance(content, str) and len(content) < _SHORT)):
        return (content,)
    functions = [tool.get("function") for tool in tools or []]
    calls = [(f.get("name"), f.get("arguments")) if isinstance(f, Mapping) else None for f in functions]
    return message_id({"content": content, "calls": calls})
