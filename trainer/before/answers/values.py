"""Values that a JSON schema allows, drawn anew in each run."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cotune.trainer.before.answers.prompts import date_in, example_in, options_in

T = TypeVar("T")
DEPTH = 12
"""Nesting at which a schema that refers to itself is cut."""
ROTATING_RUNS = 3
"""In the first runs options take turns, so that a few runs show each of them; later runs draw at random."""
ENDINGS = frozenset({"finish", "finished", "end", "__end__", "done", "stop", "exit", "none", "quit", "terminate"})
"""Options that end an application's loop come last, so that the other branches run before it."""
FORMATS = {
    "date": "2000-01-15",
    "date-time": "2000-01-15T09:30:00Z",
    "time": "09:30:00Z",
    "email": "a@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
TYPICAL_VALUES: Sequence[tuple[str, Sequence[str]]] = (
    ("datetime|timestamp", ("2000-01-15T09:30:00",)),
    ("date|day|when|deadline|birthday|departure|arrival|checkin|checkout|due", ("2000-01-15",)),
    ("timezone|tz", ("UTC",)),
    ("time|hour", ("09:30",)),
    ("year", ("2000",)),
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
    ("country", ("France", "Japan")),
    ("language|lang", ("English", "French")),
    ("phone", ("+15550100",)),
    ("number|num|count|index|idx|id|amount|price|quantity|total|cost|rating|limit|age|size", ("1",)),
    ("minutes|hours|days|percentage|score|grade", ("1", "100")),
)
"""Typical texts by words in the name of a field. They are the same for every application."""
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
    return ValueDrawer(schema, draw, about).value(schema, 0, "")


@dataclass(frozen=True)
class ValueDrawer:
    """The recursion over one schema. `field` is the path of names to the value that is drawn."""

    root: Any
    draw: Draw
    about: str
    references: frozenset[str] = field(default=frozenset())
    """References above the value: alternatives that lead back to one of them are avoided."""

    def value(self, schema: Any, depth: int, field: str) -> Any:
        if not isinstance(schema, Mapping) or depth > DEPTH:
            return None
        if "$ref" in schema:
            name = str(schema["$ref"])
            inner = ValueDrawer(self.root, self.draw, self.about, self.references | {name})
            return inner.value(resolve(name, self.root), depth + 1, field)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            options = sorted(schema["enum"], key=lambda option: str(option).lower() in ENDINGS)
            return self.draw.choose(options, field)
        for word in ("anyOf", "oneOf"):
            if schema.get(word):
                return self.value(self.alternative(schema[word], field), depth + 1, field)
        if schema.get("allOf"):
            return self.all_of(schema["allOf"], depth, field)
        kind = type_of(schema)
        if kind == "object":
            return self.object(schema, depth, field)
        if kind == "array":
            return self.array(schema, depth, field)
        if kind in ("integer", "number"):
            return self.number(schema, kind, field)
        if kind == "boolean":
            return self.draw.choose([True, False], field)
        return None if kind == "null" else self.text(schema, field)

    def alternative(self, parts: Sequence[Any], field: str) -> Any:
        """An alternative that is not null and does not lead back to where it came from, if there is one."""
        not_null = [part for part in parts if not (isinstance(part, Mapping) and part.get("type") == "null")]
        forward = [part for part in not_null if not self.returns(part)]
        if not forward and len(not_null) < len(parts):
            return {"type": "null"}
        return self.draw.choose(forward or not_null or parts, field)

    def all_of(self, parts: Sequence[Any], depth: int, field: str) -> Any:
        values = [self.value(part, depth + 1, field) for part in parts]
        if not all(isinstance(value, dict) for value in values):
            return values[0]
        merged = {}
        for value in values:
            merged.update(value)
        return merged

    def object(self, schema: Mapping[str, Any], depth: int, field: str) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        names = list(schema.get("required") or ())
        for name, part in properties.items():
            # An optional list is filled too: with an empty one, nothing would be done for its elements.
            if isinstance(part, Mapping) and part.get("type") == "array" and name not in names:
                names.append(name)
        return {name: self.value(properties.get(name, {}), depth + 1, f"{field} {name}") for name in names}

    def array(self, schema: Mapping[str, Any], depth: int, field: str) -> list[Any]:
        if schema.get("prefixItems"):
            return [self.value(item, depth + 1, field) for item in schema["prefixItems"]]
        items = schema.get("items") or {}
        count = int(schema.get("minItems") or 0)
        if not count and schema.get("maxItems") != 0 and not self.returns(items):
            count = 1
        values = []
        for i in range(count):
            draw = Draw(self.draw.run, self.draw.role, self.draw.count + i, self.draw.agents)
            drawer = ValueDrawer(self.root, draw, self.about, self.references)
            values.append(drawer.value(items, depth + 1, field))
        return values

    def number(self, schema: Mapping[str, Any], kind: str, field: str) -> float:
        step = 1 if kind == "integer" else 0.5
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is None and schema.get("exclusiveMinimum") is not None:
            low = schema["exclusiveMinimum"] + step
        if high is None and schema.get("exclusiveMaximum") is not None:
            high = schema["exclusiveMaximum"] - step
        bounds = RANGE.search(str(schema.get("description") or ""))
        if low is None and high is None and bounds:
            low, high = float(bounds[1]), float(bounds[2])

        default = schema.get("default")
        options: list[float] = [1]
        if low is not None and high is not None and low < high <= low + WIDEST_RANGE:
            options = [high, low]
        elif low is not None:
            options = [low]
        elif high is not None:
            options = [min(1, high)]
        elif isinstance(default, int | float):
            options = [default]
        elif SCORES.search(field):
            options = [1, 100, 5, 10, 0]
        chosen = self.draw.choose(options, field)
        return int(chosen) if kind == "integer" else chosen

    def text(self, schema: Mapping[str, Any], field: str) -> str:
        shortest, longest = int(schema.get("minLength") or 0), int(schema.get("maxLength") or 1 << 30)
        for option in (self.draw.choose(self.text_options(schema, field), field), "a"):
            if len(option) <= longest:
                return option.ljust(shortest, "a")
        return "a" * shortest

    def text_options(self, schema: Mapping[str, Any], field: str) -> Sequence[str]:
        """Texts for a field, from the most to the least certain source: the schema, its description, its name."""
        if schema.get("format") in FORMATS:
            return [FORMATS[schema["format"]]]
        if schema.get("pattern"):
            every = [*FORMATS.values(), *(text for _, texts in TYPICAL_VALUES for text in texts), "a", "A", "1", "AB12"]
            return [text for text in every if matches(str(schema["pattern"]), text)] or ["a"]
        default = schema.get("default")
        if isinstance(default, str) and default:
            return [default]
        name = field.rpartition(" ")[2]
        if self.draw.agents and NEXT_AGENT.search(field):
            return self.draw.agents
        # A docstring describes a field on the line that begins with its name.
        line = re.search(rf"^[ \t*:-]*(?:param )?{re.escape(name)}\b[^\n]*", self.about, re.M) if name else None
        description = f"{schema.get('description') or ''} {line[0] if line else ''}"
        if date := date_in(f"{name} {description}"):
            return [date]
        if options := options_in(description):
            return options
        if example := example_in(description):
            return [example]
        return typical_texts(name) or [chr(ord("a") + self.draw.count % 26)]

    def returns(self, schema: Any) -> bool:
        return isinstance(schema, Mapping) and str(schema.get("$ref")) in self.references


def typical_texts(name: str) -> Sequence[str]:
    """Texts that fit the name of a field; none for a name that the table does not have."""
    words = "_".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)).lower()
    for names, texts in TYPICAL_VALUES:
        if re.search(rf"(?:^|_)(?:{names})s?(?:_|$)", words):
            return texts
    return ()


def type_of(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)


def resolve(reference: str, root: Any) -> Any:
    """The part of a schema that `#/$defs/Name` refers to; all of it for a reference to the whole."""
    target = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target if reference.strip("#/") else root


def matches(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:  # JSON schemas use ECMAScript's dialect
        return False
