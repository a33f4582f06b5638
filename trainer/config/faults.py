"""What is wrong with a configuration that cannot be read: the field, its value, and where it belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from cotune.algorithms.catalogue import SETTINGS
from cotune.errors import ConfigError, field_and_fault

_PAGE = "See docs/reference/configuration.md."


def fault(error: msgspec.ValidationError, table: Mapping[str, Any], kind: type[msgspec.Struct]) -> ConfigError:
    """What to tell of a `table` that could not be converted to `kind`, with the remedy."""
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__
    field, message = field_and_fault(error)
    remedy = _PAGE
    if "unknown field" in message:
        message = "a field of the configuration; this is an unknown field"
        remedy = " ".join([*_belongs(field, kind), _PAGE])
    elif message.startswith("Invalid enum value"):
        message = f"one of {', '.join(_choices(field, kind))}"
    field = field or "config"
    return ConfigError(field, _lookup(table, field), message, remedy)


def _belongs(field: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    """Where a field of this last name is known, as a sentence; nothing where it is known nowhere."""
    name = field.rpartition(".")[2]
    places = [place for place in _fields(kind) if place.rpartition(".")[2] == name]
    places += [f"overrides.{name}"] if name in SETTINGS else []
    if places:
        above = " (at the top of the file, above the first [table])" if name in places else ""
        yield f"It belongs elsewhere: {' or '.join(places)}{above}."


def _fields(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields in tables of one configuration; those of [[policy]] tables are not in it."""
    for field in msgspec.structs.fields(kind):
        yield prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _fields(field.type, f"{prefix}{field.name}.")


def _lookup(table: Any, dotted: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", dotted):
        if isinstance(table, Mapping):
            table = table.get(part)
        else:
            table = table[int(part)] if isinstance(table, Sequence) and part.isdigit() else None
    return table


def _choices(dotted: str, kind: Any) -> list[str]:
    """The values that a field of a few words takes; none for other fields."""
    for part in re.findall(r"[a-z_]+", dotted):
        kind = next(f.type for f in msgspec.structs.fields(kind) if f.name == part)
        kind = next((a for a in get_args(kind) if isinstance(a, type) and issubclass(a, msgspec.Struct)), kind)
    words = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
    return sorted(map(str, words))
