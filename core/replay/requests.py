"""What tells two requests of a role apart: all but the names that clients and frameworks give to things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotune.records.ids import address, canonical

_NAMES = frozenset({"user", "metadata", "prompt_cache_key", "safety_identifier"})
"""Parameters that name a request, and cannot change its answer."""


def digest(messages: Sequence[Any], tools: Any, model: str, params: Mapping[str, Any]) -> str:
    """Content address of a request, without the names in it."""
    return address(canonical([unnamed(messages), tools or None, model, without_names(params)]))


def unnamed(messages: Sequence[Any]) -> list[Any]:
    """Messages without ids of their own; those of tool calls are numbered as they come."""
    numbers: dict[Any, str] = {}

    def number(id: Any) -> str:
        return numbers.setdefault(id, f"call {len(numbers) + 1}")

    return [_unnamed(message, number) if isinstance(message, Mapping) else message for message in messages]


def _unnamed(message: Mapping[str, Any], number: Any) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if name != "id"}
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [
            {**one, "id": number(one["id"])} if isinstance(one, Mapping) and isinstance(one.get("id"), str) else one
            for one in found["tool_calls"]
        ]
    if isinstance(found.get("tool_call_id"), str):
        found["tool_call_id"] = number(found["tool_call_id"])
    return found


def without_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that can change an answer."""
    return {name: value for name, value in params.items() if name not in _NAMES}
