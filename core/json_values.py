"""Replace values that JSON does not have, for records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

_JSON = (dict, list, str, int, float, bool, type(None))


def plain(value: Any, text: Callable[[Any], Any] = repr) -> Any:
    """The fields of a pydantic model, or of another object with `model_dump`; for another value, `text` of it."""
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        dumped = dump(mode="json")
        if isinstance(dumped, _JSON):
            return dumped
    return text(value)


def plain_json(value: Any) -> Any:
    """The value with only JSON values: an object with pydantic's `model_dump` as its dump, another object as its
    text."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=lambda value: plain(value, str))


def json_or_none(text: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def leaves(value: Any) -> Iterator[Any]:
    """The single values of a JSON value (texts, numbers, booleans) at any depth, without the names of fields."""
    if isinstance(value, Mapping):
        for member in value.values():
            yield from leaves(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from leaves(member)
    else:
        yield value
