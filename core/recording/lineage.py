"""Lineage: which earlier calls of an episode a prompt contains the answers of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from cotune.ids import message_id
from cotune.runtime.bounded_cache import BoundedCache, bytes_of

_SHORT = 512
"""Characters from which on a text is kept by its digest."""
ENTRIES, BYTES = 100_000, 8 << 20
"""Most answers that are kept, and most bytes of all of them."""
_OVERHEAD = 200
"""Bytes of an entry beside its key and value, about."""


class Outputs:
    """The answers of the calls that have ended; beyond the limits the least recently read are dropped."""

    def __init__(self) -> None:
        self._calls: BoundedCache[str] = BoundedCache(ENTRIES, BYTES)

    def add(self, call: str, message: Mapping[str, Any], name: str | None) -> int:
        """Keep a call's answer (an assistant message), also under the `name` a framework gives it.

        Returns how many kept answers were dropped for want of room.
        """
        keys = [*([name] if name else ()), _key(message)]
        return sum(self._calls.put(key, call, bytes_of((key, call)) + _OVERHEAD) for key in keys)

    def read_by(self, names: Iterable[str], messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Calls whose outputs a prompt contains: by the framework's names, else by its assistant messages."""
        if not len(self._calls):
            return ()
        found: dict[str, None] = {}
        for name in names:
            if call := self._calls.get(name):
                found[call] = None
        if not found:
            for message in messages:
                if message.get("role") == "assistant" and (call := self._calls.get(_key(message))):
                    found[call] = None
        return tuple(found)


def _key(message: Mapping[str, Any]) -> Hashable:
    """Key of an assistant message: its content and tool calls, without the optional fields that clients add or drop."""
    content, tools = message.get("content") or None, message.get("tool_calls")
    if not tools and (content is None or (isinstance(content, str) and len(content) < _SHORT)):
        return (content,)
    functions = [tool.get("function") for tool in tools or []]
    calls = [(f.get("name"), f.get("arguments")) if isinstance(f, Mapping) else None for f in functions]
    return message_id({"content": content, "calls": calls})
