"""Plausible values of a JSON schema, for an application that asks for structure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cotune.trainer.before.stub.fitting import AS_IT_FITS, Manner, fitting
from cotune.trainer.before.stub.matching import matching

_DEPTH = 12
"""Nesting at which a schema that refers to itself is cut."""
_SPAN = 100
"""Widest range of numbers whose upper end is taken: a larger number may be a number of real actions."""
_ENDS = frozenset({"finish", "finished", "end", "__end__", "done", "stop", "exit", "none", "quit", "terminate"})
"""Choices that end an application's loop; they come last."""
_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_WHO = re.compile(r"agent|worker|speaker|recipient|assignee|delegate|member|next|expert|specialist|role\b|^who", re.I)
"""Properties that name who is next."""
_OVER = re.compile(r"satisfied|finished|complete|done\b|solved|terminate|stop\b", re.I)
"""Properties that say whether all is done."""
_RANGE = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:-|–|\.\.|to|and)\s*(-?\d+(?:\.\d+)?)")


def example(
    schema: Any,
    variant: int = 0,
    texts: Sequence[str] = (),
    names: Sequence[str] = (),
    *,
    manner: Manner = AS_IT_FITS,
    about: str = "",
) -> Any:
    """A value that `schema` allows: small, but a list has an element, so that loops over it run once.

    `variant` rotates enums, alternatives, booleans (true first), both ends of a range, and short texts: values of
    successive variants take an application's branches and end its loops. `texts` are taken where they fit, and where a
    text names who is next, `names` in turn: nothing is called done before each had its turn. Other texts fit the
    name and description of their property, or what `about` says of it. Conditions and `not` are not followed.
    """
    return _Maker(schema, variant, texts, names, manner, about).value(schema, 0, ())


@dataclass(frozen=True)
class _Maker:
    root: Any
    variant: int
    texts: Sequence[str]
    names: Sequence[str]
    manner: Manner
    about: str
    inside: str = ""
    """The properties above."""

    def value(self, schema: Any, depth: int, above: tuple[str, ...]) -> Any:
        """`above` are the references that led here."""
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            return None
        if "$ref" in schema:
            name = str(schema["$ref"])
            return self.value(_resolve(name, self.root), depth + 1, (*above, name))
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._choice(schema["enum"])
        for word in ("anyOf", "oneOf"):
            if schema.get(word):
                return self.value(self._alternative(schema[word], above), depth + 1, above)
        if schema.get("allOf"):
            values = [self.value(part, depth + 1, above) for part in schema["allOf"]]
            merged = all(isinstance(value, dict) for value in values)
            return {name: item for value in values for name, item in value.items()} if merged else values[0]
        return self._of_type(_type(schema), schema, depth, above)

    def _choice(self, choices: Sequence[Any]) -> Any:
        given = [text for text in self.texts if text in choices]
        if given:
            return given[self.variant % len(given)]
        ordered = sorted(choices, key=lambda one: str(one).lower() in _ENDS)
        return ordered[self.variant % len(ordered)]

    def _alternative(self, parts: Sequence[Any], above: tuple[str, ...]) -> Any:
        """A part that is not null and does not lead back to where it came from, where there is one."""
        real = [part for part in parts if not (isinstance(part, Mapping) and part.get("type") == "null")]
        ahead = [part for part in real if not _returns(part, above)]
        if not ahead and len(real) < len(parts):
            return {"type": "null"}
        found = ahead or real or parts
        return found[self.variant % len(found)]

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int, above: tuple[str, ...]) -> Any:
        match kind:
            case "object":
                properties = schema.get("properties") or {}
                wanted = list(schema.get("required") or ())
                # an optional list is filled too: with a default of none, nothing would be done for each of it
                lists = [
                    name
                    for name, part in properties.items()
                    if isinstance(part, Mapping) and part.get("type") == "array"
                ]
                wanted += [name for name in lists if name not in wanted]
                return {
                    name: replace(self, inside=f"{self.inside} {name}").value(
                        properties.get(name, {}), depth + 1, above
                    )
                    for name in wanted
                }
            case "array":
                return self._list(schema, depth, above)
            case "integer" | "number":
                return self._number(schema, kind)
            case "boolean":
                if self.manner.flag is not None:
                    return self.manner.flag
                if self.names and _OVER.search(self.inside):
                    return self.variant % (len(self.names) + 1) == len(self.names)
                return self.variant % 2 == 0
            case "null":
                return None
        return self._text(schema)

    def _list(self, schema: Mapping[str, Any], depth: int, above: tuple[str, ...]) -> list[Any]:
        if schema.get("prefixItems"):
            return [self.value(item, depth + 1, above) for item in schema["prefixItems"]]
        items, least = schema.get("items") or {}, int(schema.get("minItems") or 0)
        count = least or (0 if schema.get("maxItems") == 0 or _returns(items, above) else 1)
        return [replace(self, variant=self.variant + i).value(items, depth + 1, above) for i in range(count)]

    def _number(self, schema: Mapping[str, Any], kind: str) -> float:
        whole = kind == "integer"
        step = 1 if whole else 0.5
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is None and schema.get("exclusiveMinimum") is not None:
            low = schema["exclusiveMinimum"] + step
        if high is None and schema.get("exclusiveMaximum") is not None:
            high = schema["exclusiveMaximum"] - step
        if low is None and high is None:
            bounds = _RANGE.search(str(schema.get("description") or ""))
            low, high = (float(bounds[1]), float(bounds[2])) if bounds else (None, None)
        if self.manner.number is not None:
            found = max(self.manner.number, low) if low is not None else self.manner.number
            found = min(found, high) if high is not None else found
        elif low is None:
            found = schema["default"] if isinstance(schema.get("default"), int | float) else 1
            found = found if high is None or found <= high else high
        elif high is not None and low < high <= low + _SPAN and self.variant % 2 == 0:
            found = high
        else:
            found = low
        return int(found) if whole else found

    def _text(self, schema: Mapping[str, Any]) -> str:
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        if matched := matching(str(schema.get("pattern") or "")):
            return matched[self.variant % len(matched)]
        if isinstance(schema.get("default"), str) and schema["default"]:
            return self.manner.put(str(schema["default"]), self.variant, plain=False)
        least, most = int(schema.get("minLength") or 0), int(schema.get("maxLength") or 1 << 30)
        who = self.names if _WHO.search(self.inside) else ()
        given = [text for text in who or self.texts if least <= len(text) <= most]
        if given:
            return given[self.variant % len(given)]
        name = self.inside.rpartition(" ")[2]
        # the line of the description that begins with the property, as docstrings have it
        line = re.search(rf"^[ \t*:-]*(?:param )?{re.escape(name)}\b[^\n]*", self.about, re.M) if name else None
        described = f"{schema.get('description') or ''} {line[0] if line else ''}"
        fit = fitting(name, described, self.variant, self.manner.text)
        text = fit if fit is not None and least <= len(fit) <= most else chr(ord("a") + self.variant % 26)
        return self.manner.put(text, self.variant, plain=text != fit).ljust(least, text[0])


def _returns(schema: Any, above: tuple[str, ...]) -> bool:
    return isinstance(schema, Mapping) and str(schema.get("$ref")) in above


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)


def _resolve(reference: str, root: Any) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if reference.strip("#/") else root


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def fits(schema: Any, value: Any, root: Any = None, depth: int = 0) -> bool:
    """Whether `value` has the types, names and choices that `schema` asks; bounds and formats are not looked at."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return True
    root, inside = schema if root is None else root, depth + 1
    if "$ref" in schema:
        return fits(_resolve(str(schema["$ref"]), root), value, root, inside)
    if value not in (schema.get("enum") or [value]) or value != schema.get("const", value):
        return False
    for word, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if schema.get(word) and not enough(fits(part, value, root, inside) for part in schema[word]):
            return False
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type") or ["any"]
    if isinstance(value, bool) and not {"boolean", "any"} & set(kinds):
        return False
    if not any(isinstance(value, _TYPES.get(kind, object)) for kind in kinds):
        return False
    if isinstance(value, list):
        return all(fits(schema.get("items"), one, root, inside) for one in value)
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties") or {}
    closed = schema.get("additionalProperties") is False
    return (
        all(name in value for name in schema.get("required") or ())
        and not (closed and value.keys() - properties.keys())
        and all(fits(properties.get(name), inner, root, inside) for name, inner in value.items())
    )
