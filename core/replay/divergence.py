"""Where a request first differs from the one that was recorded in its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cotune.recording.recorder import LiveCall
from cotune.replay.script import Script, ScriptCall

_SHOWN = 40
"""Characters of each text that are shown from the first difference on."""
_BEFORE = 20


def first_difference(script: Script, recorded: ScriptCall, call: LiveCall) -> str:
    """The first difference between two requests of a role, in the order messages, tools, model, parameters."""
    bodies = [script.bodies[id] for id in recorded.messages]
    for number, (was, now) in enumerate(zip(bodies, call.messages, strict=False)):
        if _text(was) != _text(now):
            return f"message {number + 1} ({_speaker(now)}), {_message_difference(was, now)}"
    if len(bodies) != len(call.messages):
        return f"it has {len(call.messages)} messages, recorded are {len(bodies)}"
    tools = script.bodies[recorded.tools] if recorded.tools else None
    if _text(tools) != _text(call.tools):
        return f"tools, {_tool_difference(tools or [], call.tools or [])}"
    if recorded.model != call.model:
        return f"the model: recorded {recorded.model!r}, now {call.model!r}"
    for name in sorted({*recorded.params, *call.params}):
        if _text(recorded.params.get(name)) != _text(call.params.get(name)):
            return f"the parameter {name}, {_value_difference(recorded.params.get(name), call.params.get(name))}"
    return "nothing: the same request was recorded fewer times"


def similarity(script: Script, recorded: ScriptCall, call: LiveCall) -> int:
    """How many messages two requests share before they differ."""
    shared = 0
    for id, now in zip(recorded.messages, call.messages, strict=False):
        if _text(script.bodies[id]) != _text(now):
            break
        shared += 1
    return shared


def _message_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name in ("role", "content", *sorted({*was, *now})):
        if _text(was.get(name)) != _text(now.get(name)):
            field = "" if name == "content" else f"{name}, "
            return field + _value_difference(was.get(name), now.get(name))
    return ""


def _tool_difference(was: Sequence[Any], now: Sequence[Any]) -> str:
    for number, (old, new) in enumerate(zip(was, now, strict=False)):
        if _text(old) != _text(new):
            return f"number {number + 1}, {_value_difference(old, new)}"
    return f"{len(now)} are offered, recorded are {len(was)}"


def _value_difference(was: Any, now: Any) -> str:
    old, new = _text(was), _text(now)
    pairs = enumerate(zip(old, new, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
    start = max(0, at - _BEFORE)
    return f"character {at + 1}: recorded {_part(old, start, at)}, now {_part(new, start, at)}"


def _part(text: str, start: int, at: int) -> str:
    end = at + _SHOWN
    return repr(f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def _speaker(message: Any) -> str:
    return str(message.get("role", "no role")) if isinstance(message, Mapping) else "no message"
