"""Replaces values in the JSON of a request, and leaves every other byte as the client wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

Path = tuple[str | int, ...]
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_OPEN, _CLOSE, _OBJECT, _COMMA, _COLON = b"{[", b"}]", b"{"[0], b","[0], b":"[0]


def replace_values(raw: bytes, old: Any, new: Any) -> bytes:
    """Write the values of `new` that differ from `old` into `raw`, the JSON text of `old`, and leave all other bytes
    alone.

    The provider then gets the application's request byte for byte, except for the edited texts, and so finds it in its
    cache.
    """
    changes = dict(_changed_values(old, new))
    if not changes:
        return raw
    spans: list[tuple[int, int, Path]] = []
    for path, start, end in _value_spans(raw):
        if path in changes:
            spans.append((start, end, path))
    # `_value_spans` leaves out values whose path is ambiguous, for example below a key that stands twice in an object.
    # If one of these values has changed, the whole text is written again.
    if {path for _, _, path in spans} != changes.keys():
        return msgspec.json.encode(new)

    parts = []
    copied = 0
    for start, end, path in sorted(spans):
        parts += [raw[copied:start], msgspec.json.encode(changes[path])]
        copied = end
    return b"".join([*parts, raw[copied:]])


def _changed_values(old: Any, new: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Find the values of `new` that differ from `old`. Yields the path and the value of each.

    Objects with the same keys, and lists of the same length, are compared item by item. Other values count as a whole.
    """
    if new is old:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        for name, value in old.items():
            yield from _changed_values(value, new[name], (*path, name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
            yield from _changed_values(old_item, new_item, (*path, index))
    elif new != old:
        yield path, new


def _value_spans(raw: bytes) -> Iterator[tuple[Path, int, int]]:
    """Find each value of a JSON text. Yields its path, the position of its first byte, and the position after its last
    byte.
    """
    path: list[str | int] = []  # a key for each open object, an index for each open list
    starts: list[int] = []  # the positions of the open objects and lists
    expects_key = False
    for token in _TOKEN.finditer(raw):
        first_byte = raw[token.start()]
        if first_byte in _OPEN:
            starts.append(token.start())
            expects_key = first_byte == _OBJECT
            path.append("" if expects_key else 0)
        elif first_byte in _CLOSE:
            path.pop()
            expects_key = False
            yield tuple(path), starts.pop(), token.end()
        elif first_byte == _COMMA:
            key_or_index = path[-1]
            if isinstance(key_or_index, int):
                path[-1] = key_or_index + 1
            else:
                expects_key = True
        elif expects_key:
            path[-1] = msgspec.json.decode(token.group())
            expects_key = False
        elif first_byte != _COLON:
            # A text, a number, or one of true, false and null.
            yield tuple(path), token.start(), token.end()
