"""What stands in a record for a value that JSON does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

_JSON = (dict, list, str, int, float, bool, type(None))


def plain(value: Any, text: Callable[[Any], Any] = repr) -> Any:
    """A pydantic model, or what dumps itself as one, by its fields; anything else as `text` of it."""
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        found = dump(mode="json")
        if isinstance(found, _JSON):
            return found
    return text(value)


def plain_json(value: Any) -> Any:
    """The value as JSON values only: an object with pydantic's `model_dump` as that gives it, any other as its text."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=lambda value: plain(value, str))


def json_or_none(text: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def leaves(value: Any) -> Iterator[Any]:
    """The texts, numbers and other single values in a JSON value, without the names in it."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    else:
        yield value
