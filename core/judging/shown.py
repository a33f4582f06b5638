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
    lines = [_text(message.get("content"))]
    for tool_call in message.get("tool_calls") or ():
        function = tool_call.get("function") or tool_call
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = canonical(arguments).decode()
        lines.append(f"calls {function.get('name')}({arguments})")
    return "\n".join(filter(None, lines)) or "(nothing)"


def shown_tools(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Names and descriptions of the tools that a request offers; empty without any."""
    functions = [tool.get("function") or tool for tool in tools or ()]
    lines = (f"- {f.get('name')}: {f.get('description') or 'no description'}" for f in functions)
    return "\n".join(["[tools]", *lines]) if functions else ""


def _text(content: Any) -> str:
    """The text of a message's content. A part without a text, such as an image, is shown as its type: `(image_url)`."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        else:
            texts.append(str(part.get("text") or f"({part.get('type')})"))
    return "\n".join(texts)
