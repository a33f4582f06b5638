"""The smallest plausible JSON value of a JSON schema: what a stub answers where an application asks for structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEPTH = 12
"""Nesting at which a schema that refers to itself is cut."""
_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def example(schema: Any, variant: int = 0) -> Any:
    """A value that `schema` allows, with required properties only. `variant` picks among enums and short texts.

    The first boolean is true, which is how loops end ("done", "approved"). Patterns, conditions and `not` are not
    followed.
    """
    return _value(schema, schema, variant, 0)


def _value(schema: Any, root: Any, variant: int, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None
    if "$ref" in schema:
        return _value(_resolve(str(schema["$ref"]), root), root, variant, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][variant % len(schema["enum"])]
    if schema.get("default") is not None:
        return schema["default"]
    for word in ("anyOf", "oneOf"):
        if schema.get(word):
            return _value(schema[word][0], root, variant, depth + 1)
    if schema.get("allOf"):
        return _all(schema["allOf"], root, variant, depth)
    return _of_type(_type(schema), schema, root, variant, depth)


def _of_type(kind: str, schema: Mapping[str, Any], root: Any, variant: int, depth: int) -> Any:
    match kind:
        case "object":
            properties = schema.get("properties") or {}
            wanted = schema.get("required") or ()
            return {name: _value(properties.get(name, {}), root, variant, depth + 1) for name in wanted}
        case "array":
            items = schema.get("prefixItems") or [schema.get("items") or {}] * int(schema.get("minItems") or 0)
            return [_value(item, root, variant, depth + 1) for item in items]
        case "integer" | "number":
            return _number(schema, kind)
        case "boolean":
            return variant % 2 == 0
        case "null":
            return None
    return _text(schema, variant)


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)


def _number(schema: Mapping[str, Any], kind: str) -> float:
    step = 1 if kind == "integer" else 0.5
    if schema.get("minimum") is not None:
        return schema["minimum"]  # type: ignore[no-any-return]
    if schema.get("exclusiveMinimum") is not None:
        return float(schema["exclusiveMinimum"]) + step if kind == "number" else int(schema["exclusiveMinimum"]) + 1
    top = schema.get("maximum", schema.get("exclusiveMaximum"))
    return 1 if top is None or top > 1 else top - step


def _text(schema: Mapping[str, Any], variant: int) -> str:
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    text = chr(ord("a") + variant % 26)
    return text.ljust(int(schema.get("minLength") or 0), text)


def _all(parts: Any, root: Any, variant: int, depth: int) -> Any:
    values = [_value(part, root, variant, depth + 1) for part in parts]
    if not all(isinstance(value, dict) for value in values):
        return values[0]
    return {name: value for part in values for name, value in part.items()}


def _resolve(reference: str, root: Any) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
