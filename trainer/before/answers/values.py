"""Values that a JSON schema allows. Each run draws its own."""

from __future__ import annotations

import random
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cotune.trainer.before.answers.prompts import date_in, example_in, options_in

T = TypeVar("T")
ROTATING_RUNS = 3
"""In the first runs options take turns, so that a few runs show each of them; later runs draw at random."""
ENDINGS = frozenset({"finish", "finished", "end", "__end__", "done", "stop", "exit", "none", "quit", "terminate"})
"""Options that end an application's loop come last, so that the other branches run before it."""
TYPICAL_VALUES: Sequence[tuple[str, Sequence[str]]] = (
    ("datetime|date_time|timestamp", ("2000-01-15T09:30:00",)),
    ("date|day|when|deadline|birthday|departure|arrival|checkin|checkout|due", ("2000-01-15",)),
    ("time|hour", ("09:30",)),
    ("url|uri|link|website|webpage|href|endpoint", ("https://example.org/",)),
    ("email|mail", ("a@example.org",)),
    ("uuid|guid", ("00000000-0000-4000-8000-000000000000",)),
    ("expression|formula|equation|calculation", ("1 + 1",)),
    ("sql", ("SELECT 1",)),
    ("code|python|program", ("print(1)",)),
    ("json", ("{}",)),
    ("currency", ("USD",)),
    ("ticker|stock", ("AAPL",)),
    ("city|location|place|destination|origin|town", ("Paris", "London")),
    ("language|lang", ("English", "French")),
    ("number|num|count|index|idx|id|amount|price|quantity|total|cost|rating|limit|age|size", ("1",)),
    ("minutes|hours|days|percentage|score|grade", ("1", "100")),
)
"""Typical texts by words in the name or the format of a field. They are the same for every application."""
SCORES = re.compile(r"score|grade|rating|confidence|percent|quality", re.I)
"""Numbers whose size decides something: without bounds, small and large ones take turns."""
NEXT_AGENT = re.compile(
    r"agent|worker|speaker|recipient|assignee|delegate|member|next|expert|specialist|role\b|^who|^to$|team|target", re.I
)
"""Fields that name who works next."""
RANGE = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:-|–|\.\.|to|and)\s*(-?\d+(?:\.\d+)?)")
WIDEST_RANGE = 100
"""The upper end of a wider range is not drawn: it may be a number of real actions."""


@dataclass(frozen=True)
class Draw:
    """Chooses for one answer: the `count`-th answer of its kind that `role` gets in run number `run`."""

    run: int
    role: str
    count: int
    agents: Sequence[str] = ()
    """Names of the application's agents that may be named in this answer."""

    def choose(self, options: Sequence[T], subject: str = "") -> T:
        """One of the options. Choices on different subjects are independent of each other from the fourth run on."""
        if self.run < ROTATING_RUNS:
            return options[(self.run + self.count) % len(options)]
        return random.Random(f"{self.run} {self.role} {self.count} {subject}").choice(options)


def draw_value(schema: Any, draw: Draw, about: str = "") -> Any:
    """A small value that `schema` allows; a list has one element, so that a loop over it runs.

    `about` is text that may describe the fields: a tool's description or the prompt. Conditions and `not` are ignored.
    """
    return ValueDrawer(schema, draw, about).value(schema, "")


@dataclass(frozen=True)
class ValueDrawer:
    """The recursion over one schema. `path` are the names of the fields that lead to the value that is drawn."""

    root: Any
    draw: Draw
    about: str
    references: frozenset[str] = frozenset()
    """References above the value: they are not followed again."""

    def value(self, schema: Any, path: str) -> Any:
        """Draw a value that `schema` allows. Returns None for a schema that is no mapping, or that refers to a schema
        around it: its values would contain themselves without end."""
        if not isinstance(schema, Mapping) or self.returns(schema):
            return None
        if "$ref" in schema:
            inner = replace(self, references=self.references | {schema["$ref"]})
            return inner.value(resolve_reference(schema["$ref"], self.root), path)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            # Values that may end a loop come last, so that the first run goes through the others (sorting is stable).
            options = sorted(schema["enum"], key=lambda option: str(option).lower() in ENDINGS)
            return self.draw.choose(options, path)
        for word in ("anyOf", "oneOf"):
            if schema.get(word):
                return self.alternative(schema[word], path)
        if schema.get("allOf"):
            values = [self.value(part, path) for part in schema["allOf"]]
            objects = [value for value in values if isinstance(value, dict)]
            if not objects:
                return values[0]
            return dict(ChainMap(*objects))  # an object with the fields of all parts
        kind = type_of(schema)
        if kind == "object":
            return self.object(schema, path)
        if kind == "array":
            return self.array(schema, path)
        if kind in ("integer", "number"):
            number = self.draw.choose(number_options(schema, path), path)
            return int(number) if kind == "integer" else number
        if kind == "boolean":
            return self.draw.choose([True, False], path)
        return None if kind == "null" else self.text(schema, path)

    def returns(self, schema: Any) -> bool:
        """Whether a schema leads back to one above it."""
        return isinstance(schema, Mapping) and schema.get("$ref") in self.references

    def alternative(self, parts: Sequence[Any], path: str) -> Any:
        """A value of one alternative, but null only if all others lead back to where they came from."""
        usable = []
        for part in parts:
            if isinstance(part, Mapping) and part.get("type") != "null" and not self.returns(part):
                usable.append(part)
        return self.value(self.draw.choose(usable, path), path) if usable else None

    def object(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Draw the required fields of an object, and its lists."""
        properties = schema.get("properties") or {}
        names = list(schema.get("required") or ())
        for name, part in properties.items():
            # An optional list is filled too: with an empty one, nothing would be done for its elements.
            if isinstance(part, Mapping) and part.get("type") == "array" and name not in names:
                names.append(name)
        return {name: self.value(properties.get(name, {}), f"{path} {name}") for name in names}

    def array(self, schema: Mapping[str, Any], path: str) -> list[Any]:
        """Draw the elements of a list: the least number that the schema allows, and one element if it allows none.

        A list whose elements contain the list's own schema stays empty, because it would never end.
        """
        if schema.get("prefixItems"):
            return [self.value(item, path) for item in schema["prefixItems"]]
        items = schema.get("items") or {}
        length = int(schema.get("minItems") or 0)
        is_endless = self.returns(items)
        if length == 0 and schema.get("maxItems") != 0 and not is_endless:
            length = 1
        elements: list[Any] = []
        for index in range(length):
            # Another count for each element, so that the elements differ.
            draw = replace(self.draw, count=self.draw.count + index)
            elements.append(replace(self, draw=draw).value(items, path))
        return elements

    def text(self, schema: Mapping[str, Any], path: str) -> str:
        text = self.draw.choose(self.text_options(schema, path), path)
        return text.ljust(int(schema.get("minLength") or 0), "a")[: schema.get("maxLength")]

    def text_options(self, schema: Mapping[str, Any], path: str) -> Sequence[str]:
        """Return texts for a field, from the first source that has one: the schema's format and default, the names of
        agents, the field's description, or its name."""
        name = path.rpartition(" ")[2]
        if texts := typical_texts(str(schema.get("format") or "")):
            return texts
        if schema.get("default"):
            return [str(schema["default"])]
        if self.draw.agents and NEXT_AGENT.search(name):
            return self.draw.agents
        # The description is in the schema, or on the line of the tool's docstring that begins with the field's name.
        line_in_docstring = ""
        if name and (match := re.search(rf"^[ \t*:-]*(?:param )?{re.escape(name)}\b[^\n]*", self.about, re.M)):
            line_in_docstring = match[0]
        description = f"{schema.get('description') or ''} {line_in_docstring}"
        if date := date_in(f"{name} {description}"):
            return [date]
        if options := options_in(description):
            return options
        if example := example_in(description):
            return [example]
        if texts := typical_texts(name):
            return texts
        letter_of_draw = chr(ord("a") + self.draw.count % 26)  # differs from one draw to the next
        return [letter_of_draw]


def number_options(schema: Mapping[str, Any], path: str) -> Sequence[float]:
    """Numbers that a drawn answer may have for this schema, the first choice first.

    They are both bounds of a narrow range, or else one bound, the default, or typical numbers. Bounds are also read
    from the description.
    """
    step = 1 if schema.get("type") == "integer" else 0.5
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("exclusiveMinimum") is not None:
        low = schema["exclusiveMinimum"] + step
    if schema.get("exclusiveMaximum") is not None:
        high = schema["exclusiveMaximum"] - step
    bounds = RANGE.search(str(schema.get("description") or ""))
    if low is None and high is None and bounds:
        low, high = float(bounds[1]), float(bounds[2])
    if low is not None and high is not None and low < high <= low + WIDEST_RANGE:
        return [high, low]
    if low is not None:
        return [low]
    if high is not None:
        return [min(1, high)]
    if isinstance(schema.get("default"), int | float):
        return [schema["default"]]
    return [1, 100, 5, 10, 0] if SCORES.search(path) else [1]


def typical_texts(name: str) -> Sequence[str]:
    """Texts that fit the name of a field; none for a name that the table does not have."""
    words = "_".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)).lower()
    for names, texts in TYPICAL_VALUES:
        if re.search(rf"(?:^|_)(?:{names})s?(?:_|$)", words):
            return texts
    return ()


def type_of(schema: Mapping[str, Any]) -> str:
    """The type of a schema's values. If the schema allows several, it is the first that is not null. If it names none,
    it is the type that the other keywords imply."""
    kind = schema.get("type")
    if isinstance(kind, list):
        return str(next((name for name in kind if name != "null"), "null"))
    if kind is not None:
        return str(kind)
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else "string"


def resolve_reference(reference: str, root: Any) -> Any:
    """The part of a schema that `#/$defs/Name` refers to; all of it for a reference to the whole."""
    target = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target if reference.strip("#/") else root
