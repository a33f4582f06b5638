"""Minimal values of JSON schemas."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cotune.example_json import example

SCHEMAS: list[tuple[Any, Any]] = [
    ({"type": "string"}, "a"),
    ({"type": "string", "minLength": 3}, "aaa"),
    ({"type": "string", "format": "date"}, "2000-01-01"),
    ({"type": "integer"}, 1),
    ({"type": "integer", "minimum": 5}, 5),
    ({"type": "integer", "exclusiveMinimum": 5}, 6),
    ({"type": "number", "exclusiveMaximum": 0}, -0.5),
    ({"type": "boolean"}, True),
    ({"type": ["null", "integer"]}, 1),
    ({"enum": ["x", "y"]}, "x"),
    ({"const": 7}, 7),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
    ({"type": "array", "items": {"type": "integer"}}, []),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
        {"a": 1},
    ),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]},
            ]
        },
        {"a": 1, "b": 2},
    ),
    ({"$ref": "#/$defs/it", "$defs": {"it": {"type": "integer"}}}, 1),
    ({"type": "string", "default": "usual"}, "usual"),
]


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS, ids=lambda value: str(value)[:40])
def test_the_value_is_valid_and_small(schema: Any, expected: Any) -> None:
    assert example(schema) == expected
    Draft202012Validator(schema).validate(example(schema))


def test_variants_differ_and_stay_valid() -> None:
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string"}, "kind": {"enum": [1, 2]}},
        "required": ["word", "kind"],
    }
    assert [example(schema, i) for i in range(3)] == [
        {"word": "a", "kind": 1},
        {"word": "b", "kind": 2},
        {"word": "c", "kind": 1},
    ]


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    value, depth = example(schema), 0
    while value is not None:
        value, depth = value["next"], depth + 1
    assert 1 <= depth <= 12


def test_what_is_no_schema_is_null() -> None:
    assert example(True) is None
    assert example({"$ref": "#/nowhere"}) is None
