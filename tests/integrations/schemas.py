"""Fifty JSON schemas, bounded so that even noise ends: nested, enums, arrays, unions, patterns, formats, references."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_LEAVES: tuple[Schema, ...] = (
    {"enum": ["north", "south", 'é\n"', 3, None]},
    {"type": "integer", "minimum": -5, "maximum": 1200},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    {"type": "string", "minLength": 1, "maxLength": 8},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
)


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _shapes(leaf: Schema, other: Schema) -> list[Schema]:
    array = {"type": "array", "items": leaf, "minItems": 1, "maxItems": 3}
    return [
        _object(value=leaf),
        _object(first=leaf, second=other, third={"const": "done"}),
        {**_object(value=leaf, maybe=other), "required": ["value"]},
        _object(values=array),
        {"type": "array", "items": _object(key=leaf, more=array), "minItems": 1, "maxItems": 2},
        _object(inner=_object(inner=_object(value=leaf, other=other))),
        {"anyOf": [_object(kind={"const": "a"}, value=leaf), _object(kind={"const": "b"}, other=other)]},
        {**_object(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}), "$defs": {"leaf": leaf}},
        {"type": "array", "prefixItems": [leaf, other], "items": False, "minItems": 2},
        _object(day={"type": "string", "format": "uuid"}, value=leaf, flag={"type": "boolean"}),
    ]


SCHEMAS: tuple[Schema, ...] = tuple(
    itertools.chain.from_iterable(_shapes(leaf, _LEAVES[(i + 1) % len(_LEAVES)]) for i, leaf in enumerate(_LEAVES))
)


def form(schema: Schema) -> dict[str, Any]:
    """A request's response_format of this schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}}
