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
    # A key that stands twice in an object, for example, makes a path ambiguous: then all of it is written again.
    if {path for _, _, path in spans} != changes.keys():
        return msgspec.json.encode(new)

    parts = []
    copied = 0
    for start, end, path in sorted(spans):
        parts += [raw[copied:start], msgspec.json.encode(changes[path])]
        copied = end
    return b"".join([*parts, raw[copied:]])


def _changed_values(old: Any, new: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and value of the outermost values of `new` that differ from `old`."""
    if new is old:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        for name, value in old.items():
            yield from _changed_values(value, new[name], (*path, name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (was, now) in enumerate(zip(old, new, strict=True)):
            yield from _changed_values(was, now, (*path, number))
    elif new != old:
        yield path, new


def _value_spans(raw: bytes) -> Iterator[tuple[Path, int, int]]:
    """Each value of a JSON text: its path, its first byte, and the byte after its last one."""
    path: list[str | int] = []
    starts: list[int] = []
    named = False
    """Whether the next token is a key."""
    for token in _TOKEN.finditer(raw):
        first = raw[token.start()]
        if first in _OPEN:
            starts.append(token.start())
            named = first == _OBJECT
            path.append("" if named else 0)
        elif first in _CLOSE:
            path.pop()
            named = False
            yield tuple(path), starts.pop(), token.end()
        elif first == _COMMA:
            number = path[-1]
            if isinstance(number, int):
                path[-1] = number + 1
            else:
                named = True
        elif named:
            path[-1] = msgspec.json.decode(token.group())
            named = False
        elif first != _COLON:
            yield tuple(path), token.start(), token.end()
