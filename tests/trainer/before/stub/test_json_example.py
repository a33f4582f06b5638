"""Minimal values of JSON schemas."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cotune.trainer.before.stub.json_example import example, fits
from cotune.trainer.before.stub.matching import matching

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
    ({"type": "array", "items": {"type": "integer"}}, [1]),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, []),
    (
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}, "default": []}}},
        {"a": ["a"]},
    ),
    ({"type": "number", "minimum": 0, "maximum": 1}, 1),
    ({"type": "integer", "minimum": 0, "maximum": 5000}, 0),
    ({"type": "integer", "description": "a score from 1 to 10"}, 10),
    ({"enum": ["FINISH", "writer"]}, "writer"),
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


def test_choices_rotate_so_that_branches_are_taken_and_loops_end() -> None:
    route = {"type": "string", "enum": ["FINISH", "writer", "critic"]}
    assert [example(route, i) for i in range(4)] == ["writer", "critic", "FINISH", "writer"]
    assert [example({"type": "boolean"}, i) for i in range(3)] == [True, False, True]
    assert [example({"type": "number", "minimum": 0, "maximum": 1}, i) for i in range(2)] == [1, 0]
    either = {"anyOf": [{"const": "respond"}, {"const": "plan"}, {"type": "null"}]}
    assert [example(either, i) for i in range(3)] == ["respond", "plan", "respond"]


def test_texts_are_used_where_they_fit() -> None:
    schema = {
        "type": "object",
        "properties": {"verdict": {"enum": ["reject", "approve"]}, "why": {"type": "string", "maxLength": 8}},
        "required": ["verdict", "why"],
    }
    assert example(schema, 0, ["approve", "a longer text"]) == {"verdict": "approve", "why": "approve"}


def test_a_schema_that_names_itself_alone_fits_anything() -> None:
    assert fits({"$ref": "#"}, 1)
    assert fits({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"}, 1)


def test_what_a_schema_allows_fits() -> None:
    schema = {
        "$defs": {"step": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
            "done": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["steps"],
        "additionalProperties": False,
    }
    for value in ({"steps": []}, {"steps": [{"n": 1}], "done": None}):
        assert fits(schema, value)
    for value in (
        {},
        {"steps": [{"n": "1"}]},
        {"steps": [], "done": 1},
        {"steps": [], "more": 1},
        {"steps": [{"n": True}]},
    ):
        assert not fits(schema, value)


@pytest.mark.parametrize("optional", [True, False])
def test_a_tree_of_itself_ends_in_an_empty_list(optional: bool) -> None:
    node = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": [] if optional else ["children"],
    }
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert example(schema) == {"children": []}


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    value, depth = example(schema), 0
    while value is not None:
        value, depth = value["next"], depth + 1
    assert 1 <= depth <= 12


def test_what_is_no_schema_is_null() -> None:
    assert example(True) is None
    assert example({"$ref": "#/nowhere"}) is None


def test_everybody_has_a_turn_before_all_is_said_to_be_done() -> None:
    answer = {"type": "object", "properties": {"reason": {"type": "string"}, "answer": {}}, "required": ["answer"]}
    who, over = ({**answer, "properties": {"answer": {"type": kind}}} for kind in ("string", "boolean"))
    ledger = {"type": "object", "properties": {"is_request_satisfied": over, "next_speaker": who, "question": who}}
    schema = {**ledger, "required": list(ledger["properties"])}
    values = [example(schema, variant, names=["coder", "surfer"]) for variant in range(4)]
    assert [value["next_speaker"]["answer"] for value in values] == ["coder", "surfer", "coder", "surfer"]
    assert [value["is_request_satisfied"]["answer"] for value in values] == [False, False, True, False]
    assert [value["question"]["answer"] for value in values] == ["a", "b", "c", "d"]
    assert example(schema)["is_request_satisfied"]["answer"] is True, "as every boolean where nobody is named"


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"^[A-Z]{2}-\d+(?:\.\d)?$", ["AA-1"]),
        (r"(yes|no), *\w*", ["yes,a", "no,a"]),
        (r"<v>\s*(.*?)\s*</v>\n", ["<v>a</v>\n"]),
        (r"(a)\1[^a]", []),
        (r"(", []),
    ],
)
def test_texts_that_a_pattern_matches(pattern: str, texts: list[str]) -> None:
    assert matching(pattern) == texts
    if texts:
        assert example({"type": "string", "pattern": pattern}) == texts[0]
