"""Replies in the Hermes/Qwen convention: `<think>` is reasoning, `<tool_call>{json}</tool_call>` is a tool call."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any

REASONING = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")

_TOOL_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
_ID_ALPHABET = string.ascii_letters + string.digits


def read_hermes(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The rest of a reply and its calls. A call that cannot be read, or is not closed, stays in the rest."""
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        call = _read_call(match.group(1))
        if call is None:
            return match.group(0)
        calls.append(call)
        return ""

    return _TOOL_CALL.sub(take, text), calls


def call_grammar(name: str, arguments: str, token: Callable[[str], int | None]) -> str:
    """The grammar of what follows the mark of a call, given that of its arguments; `token` is the id of a mark that
    stands outside of text, None for one that is text."""
    opened = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    closing = token(TOOL_CALL[1])
    end = json.dumps(TOOL_CALL[1]) if closing is None else f"<[{closing}]>"
    return rf'/\n?/ {opened} {arguments} "}}" /\n?/ {end}'


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """(reasoning, rest); a reply that ends within its reasoning has no rest. `opened`: the prompt ends within it."""
    opening, closing = REASONING
    before, closed, after = text.partition(closing)
    if closed:
        return before.partition(opening)[2].strip() if opening in before else before.strip(), after.lstrip("\n")
    if text.lstrip().startswith(opening):
        return text.partition(opening)[2].strip(), ""
    if opened:
        return text.strip(), ""
    return "", text


def is_call(call: Any) -> bool:
    """Whether a value is a call: a name, and arguments that are an object or the JSON of one."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return False
    arguments = call.get("arguments", {})
    return isinstance(_value(arguments) if isinstance(arguments, str) else arguments, dict)


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in OpenAI form, with the id that it brings, or one of its own."""
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = call.get("id") or "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))
    return {"id": name, "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _read_call(body: str) -> dict[str, Any] | None:
    call = _value(body)
    return call if is_call(call) else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
