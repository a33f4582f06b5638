"""Compare requests: whether they are equal apart from ids that clients choose, and their first difference."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotune.recording.recorder import LiveCall
from cotune.records.ids import address, canonical
from cotune.records.images import without_image_bytes
from cotune.replay.script import Script, ScriptCall

_IDENTIFYING_PARAMS = frozenset({"user", "metadata", "prompt_cache_key", "safety_identifier"})
"""Parameters that identify a request and cannot change its answer."""
_EXCERPT_AFTER = 40
_EXCERPT_BEFORE = 20
"""Number of characters of each text that are shown after its first difference, and before it."""
_DAYS = "mon|tue|wed|thu|fri|sat|sun"
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_CHANCE_PATTERNS = {
    "a uuid": re.compile(r"(?<![0-9a-f])[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}(?![0-9a-f])", re.I),
    "a date": re.compile(
        rf"(?<!\d)\d{{1,4}}([-/.])\d{{1,2}}\1\d{{1,4}}(?!\d)|\b({_DAYS})[a-z]*\b|"
        rf"(\d{{1,2}}(st|nd|rd|th)? )?\b({_MONTHS})[a-z]*\.? \d{{1,4}}(st|nd|rd|th)?(,? \d{{4}})?\b",
        re.I,
    ),
    "a time": re.compile(r"(?<!\d)\d{1,2}:\d{2}(:\d{2})?([.,]\d+)?|(?<!\d)1\d{9}(\d{3}){0,3}(\.\d+)?(?!\d)"),
    "a random number": re.compile(r"\d*\.\d{5,}(e-?\d+)?|\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", re.I),
}
"""Texts that probably come from clock, uuid or random."""
LOOKS_LIKE = " (it looks like "


def digest(messages: Sequence[Any], tools: Any, model: str, params: Mapping[str, Any]) -> str:
    """Content address of a request without the ids in it."""
    return address(canonical([without_ids(messages), tools or None, model, answer_params(params)]))


def without_ids(messages: Sequence[Any]) -> list[Any]:
    """Messages without their ids. Ids of tool calls are replaced with numbers in the order of their occurrence."""
    numbers: dict[Any, str] = {}

    def number_of(id: Any) -> str:
        return numbers.setdefault(id, f"call {len(numbers) + 1}")

    return [_without_ids(message, number_of) if isinstance(message, Mapping) else message for message in messages]


def _without_ids(message: Mapping[str, Any], number_of: Callable[[Any], str]) -> dict[str, Any]:
    """A copy of a message without its id, in which `number_of(id)` replaces each id of a tool call."""
    fields = {name: value for name, value in message.items() if name != "id"}
    if isinstance(fields.get("tool_calls"), list):
        numbered_calls = []
        for call in fields["tool_calls"]:
            if isinstance(call, Mapping) and isinstance(call.get("id"), str):
                numbered_calls.append({**call, "id": number_of(call["id"])})
            else:
                numbered_calls.append(call)
        fields["tool_calls"] = numbered_calls
    if isinstance(fields.get("tool_call_id"), str):
        fields["tool_call_id"] = number_of(fields["tool_call_id"])
    return fields


def answer_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that can change an answer."""
    return {name: value for name, value in params.items() if name not in _IDENTIFYING_PARAMS}


def first_difference(script: Script, recorded: ScriptCall, call: LiveCall) -> str:
    """A phrase for the first difference of the request `call` from a recorded request. Messages are compared first,
    then tools, the model and parameters."""
    messages_in_record, recorded_tools = script.messages_and_tools(recorded)
    recorded_messages = _comparable_messages(messages_in_record)
    messages = _comparable_messages(call.messages)
    for number, (was, now) in enumerate(zip(recorded_messages, messages, strict=False), 1):
        if _text(was) != _text(now):
            speaker = str(now.get("role", "no role")) if isinstance(now, Mapping) else "no message"
            return f"message {number} ({speaker}), {_message_difference(was, now)}"
    if len(recorded_messages) != len(messages):
        return f"it has {len(messages)} messages, recorded are {len(recorded_messages)}"
    if _text(recorded_tools) != _text(call.tools):
        return f"tools, {_tool_difference(recorded_tools or [], call.tools or [])}"
    if recorded.model != call.model:
        return f"the model: recorded {recorded.model!r}, now {call.model!r}"
    for name in sorted(answer_params({**recorded.params, **call.params})):
        if _text(recorded.params.get(name)) != _text(call.params.get(name)):
            return f"the parameter {name}, {_value_difference(recorded.params.get(name), call.params.get(name))}"
    return "nothing: the same request was recorded fewer times"


def similarity(script: Script, recorded: ScriptCall, call: LiveCall) -> int:
    """The number of messages that two requests share before their first difference."""
    recorded_messages, _ = script.messages_and_tools(recorded)
    n_shared = 0
    pairs = zip(_comparable_messages(recorded_messages), _comparable_messages(call.messages), strict=False)
    for recorded_message, message in pairs:
        if _text(recorded_message) != _text(message):
            break
        n_shared += 1
    return n_shared


def _comparable_messages(messages: Sequence[Any]) -> list[Any]:
    """Messages in the form that is compared: an image by its hash."""
    return [without_image_bytes(message) for message in without_ids(messages)]


def _message_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field in which two messages differ, and its difference; role and content come first."""
    for name in ("role", "content", *sorted({*was, *now})):
        if _text(was.get(name)) != _text(now.get(name)):
            field = "" if name == "content" else f"{name}, "
            return field + _value_difference(was.get(name), now.get(name))
    return ""


def _tool_difference(was: Sequence[Any], now: Sequence[Any]) -> str:
    """The first tool that differs, and its difference, or the numbers of tools."""
    for number, (old, new) in enumerate(zip(was, now, strict=False)):
        if _text(old) != _text(new):
            return f"number {number + 1}, {_value_difference(old, new)}"
    return f"{len(now)} are offered, recorded are {len(was)}"


def _value_difference(was: Any, now: Any) -> str:
    """A phrase for the first character at which two values differ, with the text around it in both.

    It names a time or a random number that it recognises by its form, because these differ in every run and can be
    recorded.
    """
    old = _text(was)
    new = _text(now)
    position = 0
    shorter = min(len(old), len(new))
    while position < shorter and old[position] == new[position]:
        position += 1
    start = max(0, position - _EXCERPT_BEFORE)
    looks_like = ""
    for kind, pattern in _CHANCE_PATTERNS.items():
        if _matches_at(pattern, old, position) and _matches_at(pattern, new, position):
            looks_like = f"{LOOKS_LIKE}{kind})"
            break
    old_excerpt = _excerpt(old, start, position)
    new_excerpt = _excerpt(new, start, position)
    return f"character {position + 1}: recorded {old_excerpt}, now {new_excerpt}{looks_like}"


def _matches_at(form: re.Pattern[str], text: str, position: int) -> bool:
    """Whether a match of the form covers this character of the text."""
    return any(match.start() <= position <= match.end() for match in form.finditer(text))


def _excerpt(text: str, start: int, position: int) -> str:
    """An excerpt of a text around a position, for a message."""
    end = position + _EXCERPT_AFTER
    return repr(f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}")


def _text(value: Any) -> str:
    """A value as a text to compare: JSON unless it is a text."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)
