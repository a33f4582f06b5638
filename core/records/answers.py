"""The answer to a call, and a check that records can hold it: other values are taken out and named.

A provider may send anything. An application that does not read a field never notices that it has a wrong type, but such
a field would make the record unreadable.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from cotune.records.ids import pack_ids
from cotune.records.structs import Candidate, PolicyRef, Usage

MALFORMED = "malformed"
"""Key of a stored message that holds the values taken out of it, by field."""
MOST = 2**53
"""Counts must be lower: every reader of JSON keeps these integers exact."""
_NAMED = 5
"""Maximum number of faults that are named. The others are counted."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer to a call: all candidates, and the index of the chosen one, which the application gets.

    `rewards[i]` are the reward components of candidate i, from before the selection; empty if no scorer ran or the
    scorer failed (`error`). `feedback[i]` is the text given with them. `sampling` holds the parameters that were used,
    with the seed. `replayed` is the recorded call whose answer is repeated here.
    """

    candidates: tuple[Candidate, ...]
    chosen: int = 0
    prompt_ids: tuple[int, ...] = ()
    policy: PolicyRef | None = None
    usage: Usage = Usage()
    rewards: tuple[Mapping[str, float], ...] = ()
    feedback: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = {}
    error: str | None = None
    replayed: str | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = ""
    arguments: str | None = ""


class _Tool(msgspec.Struct, gc=False):
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[str | dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Tool] | None = None


_encode = msgspec.json.Encoder().encode
_fields = {field.name: msgspec.json.Decoder(field.type).decode for field in msgspec.structs.fields(_Message)}


def counts(reported: Any, prompt_name: str, completion_name: str) -> Usage:
    """Token counts that a provider reports under these two names. `well_formed` replaces values that are not counts."""
    if reported is None:
        return Usage()
    if not isinstance(reported, Mapping):
        return Usage(reported, reported)
    return Usage(reported.get(prompt_name) or 0, reported.get(completion_name) or 0)


def well_formed(answer: Answer) -> tuple[Answer, str | None]:
    """The answer in a form that records can hold, and a description of its faults; None without faults.

    A value of the wrong type is replaced with an empty value of the right type. Wrong values of a message are stored
    under its key `malformed`.
    """
    faults: list[str] = []
    candidates = tuple(_candidate(i, candidate, faults) for i, candidate in enumerate(answer.candidates))
    usage = Usage(
        _count(answer.usage.prompt_tokens, "usage.prompt_tokens", faults),
        _count(answer.usage.completion_tokens, "usage.completion_tokens", faults),
    )
    prompt_ids = answer.prompt_ids
    if not _are_ids(prompt_ids):
        faults.append("prompt_token_ids are no token ids")
        prompt_ids = ()
    fixed = replace(answer, candidates=candidates, usage=usage, prompt_ids=prompt_ids)
    if not faults:
        return fixed, None
    text = ", ".join(faults[:_NAMED])
    if len(faults) > _NAMED:
        text += f" and {len(faults) - _NAMED} more"
    return fixed, f"the provider's answer is malformed: {text}"


def _candidate(index: int, candidate: Candidate, faults: list[str]) -> Candidate:
    """A candidate with only values that records can hold. Wrong values are replaced, and named in `faults`."""
    prefix = f"choices[{index}]." if index else ""  # of names in `faults`
    text = candidate.text
    finish_reason = candidate.finish_reason
    if not isinstance(text, str):
        text = ""
    if not isinstance(finish_reason, str):
        faults.append(f"{prefix}finish_reason is {_kind(finish_reason)}")
        finish_reason = "unknown"
    token_ids = candidate.token_ids
    logprobs = candidate.logprobs
    if not _are_ids(token_ids):
        faults.append(f"{prefix}token_ids are no token ids")
        token_ids = ()
    if not _are_logprobs(logprobs):
        faults.append(f"{prefix}logprobs are not all numbers")
        logprobs = ()
    return Candidate(
        index=index,
        text=storable(text),
        message=_message(candidate.message, prefix, faults),
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=storable(finish_reason),
        malformed=bool(candidate.malformed),
        shown=candidate.shown,
        stop=storable(candidate.stop) if isinstance(candidate.stop, str) else "",
    )


def _message(sent: Any, prefix: str, faults: list[str]) -> dict[str, Any]:
    """An assistant message with only values that records can hold. Wrong fields move to the field `MALFORMED`, and are
    named in `faults`, with `prefix` before their names."""
    plain = storable(sent)
    if not isinstance(plain, dict):
        faults.append(f"{prefix}message is {_kind(sent)}")
        return {"role": "assistant", "content": None, MALFORMED: {"message": plain}}
    # An integration may have moved wrong fields there before: keep these too.
    moved = plain.pop(MALFORMED, {})
    wrong_fields = dict(moved) if isinstance(moved, dict) else {MALFORMED: moved}
    faults.extend(f"{prefix}{name}" for name in wrong_fields)
    for name, decode in _fields.items():
        if name not in plain:
            continue
        try:
            decode(_encode(plain[name]))
        except msgspec.ValidationError:
            faults.append(f"{prefix}message.{name} is {_kind(plain[name])}")
            wrong_fields[name] = plain.pop(name)
    if not wrong_fields and "role" in plain:
        return plain
    message = {"role": "assistant", "content": None, **plain}
    if wrong_fields:
        message[MALFORMED] = wrong_fields
    return message


def storable(value: Any) -> Any:
    """The value after a conversion to JSON and back, which a record can hold. A value that JSON cannot hold becomes its
    `repr`, a lone surrogate its escape, and a value that is nested too deeply a text in brackets."""
    try:
        return msgspec.json.decode(_encode(value))
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass  # a value that the quick encoder refuses: the slow way below can replace it
    try:
        text = json.dumps(value, default=repr, skipkeys=True)
        return msgspec.json.decode(json.dumps(clean(json.loads(text))))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return f"[{type(value).__name__} that is no JSON]"


def clean(value: Any) -> Any:
    """A JSON value in a form that every reader of JSON accepts: long integers become texts, lone surrogates their
    escapes, and NaN and infinities None."""
    if isinstance(value, str):
        # UTF-16 joins two adjacent halves of a surrogate pair to one character. Two events of a stream may have brought
        # them separately.
        joined = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _count(value: Any, name: str, faults: list[str]) -> int:
    """A count that a provider reports under `name`; 0 for a wrong value, which is named in `faults`."""
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if is_whole and 0 <= value < MOST:
        return int(value)
    faults.append(f"{name} is {_kind(value)}")
    return 0


def _are_ids(ids: Sequence[int]) -> bool:
    """Whether these are token ids that a store can pack."""
    try:
        return not ids or (min(ids) >= 0 and bool(pack_ids(ids)))
    except (struct.error, TypeError, OverflowError):  # other values than integers, or too large ones
        return False


def _are_logprobs(values: Sequence[float]) -> bool:
    """Whether these are finite numbers that float32 can hold."""
    try:
        return not values or (all(map(math.isfinite, values)) and max(map(abs, values)) < 1e38)
    except (TypeError, OverflowError):  # other values than numbers, or too large ones
        return False


def _kind(value: Any) -> str:
    """The value if it is a number, else its type. The content of an answer is never quoted."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**20 else "a huge number"
    return f"of type {type(value).__name__}"
