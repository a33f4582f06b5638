"""Outputs of one episode: which call said what, so that a prompt tells which calls it has read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from cotune.ids import message_id
from cotune.runtime.bounded_cache import BoundedCache, bytes_of

_SHORT = 512
"""Characters from which on a text is remembered by its digest."""
ENTRIES, BYTES = 100_000, 8 << 20
"""Most answers, and bytes of all, that are remembered."""
_OVERHEAD = 200
"""Bytes of an entry beside its key and value, about."""


class Outputs:
    """Answers of the calls that have ended: the least recently read are forgotten for want of room."""

    def __init__(self) -> None:
        self._calls: BoundedCache[str] = BoundedCache(ENTRIES, BYTES)

    def add(self, call: str, message: Mapping[str, Any], name: str | None) -> int:
        """Remember what a call said, also under the `name` a framework gives it. Returns how many are forgotten."""
        keys = [*([name] if name else ()), _said(message)]
        return sum(self._calls.put(key, call, bytes_of((key, call)) + _OVERHEAD) for key in keys)

    def read_by(self, names: Iterable[str], messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Calls whose outputs a prompt contains: by the framework's names, else by what its messages say."""
        if not len(self._calls):
            return ()
        found: dict[str, None] = {}
        for name in names:
            if call := self._calls.get(name):
                found[call] = None
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
