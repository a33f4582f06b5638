"""Requests and answers as plain text for a judge, with tool calls and without pictures or sound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cotune.records.ids import canonical


def shown_messages(messages: Iterable[Mapping[str, Any]]) -> str:
    """Messages in OpenAI form as text, each under its role."""
    return "\n\n".join(f"[{message.get('role', 'message')}]\n{shown_message(message)}" for message in messages)


def shown_message(message: Mapping[str, Any]) -> str:
    """The text and the tool calls of a message."""
    calls = [tool.get("function") or tool for tool in message.get("tool_calls") or ()]
    lines = [_text(message.get("content"))]
    lines += [f"calls {function.get('name')}({_plain(function.get('arguments'))})" for function in calls]
    return "\n".join(filter(None, lines)) or "(nothing)"


def shown_tools(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Names and descriptions of the tools that a request offers; empty without any."""
    functions = [tool.get("function") or tool for tool in tools or ()]
    lines = (f"- {f.get('name')}: {f.get('description') or 'no description'}" for f in functions)
    return "\n".join(["[tools]", *lines]) if functions else ""


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = (part if isinstance(part, str) else str(part.get("text") or f"({part.get('type')})") for part in content)
    return "\n".join(parts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else canonical(value).decode()
