"""Texts in the form that a prompt shows: its largest JSON example or form, filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from cotune.trainer.before.answers.prompts import QUOTED_EXAMPLE, options_in
from cotune.trainer.before.answers.values import Draw, draw_value, typical_texts

TYPE_KEY = "sketched type"
SKETCHED_TYPE = re.compile(
    r"(?<=[:\[])\s*<?(?:(?P<string>string|str|text)|(?P<boolean>boolean|bool|true or false)"
    r"|(?P<integer>integer|int|\d+\s*(?:-|–|to)\s*\d+)|(?P<number>number|float|\d[\d.]*\s*(?:-|–|to)\s*\d[\d.]*))\b>?"
    r"(?:\s*\([^)\n]*\))?[^,\n}\]]*",
    re.I,
)
"""A type or a range in place of a value, as in `{"age": integer (in years), "score": 1-5}`."""
ALTERNATIVES = re.compile(r'"[^"\n]*"(?:\s*(?:\||/|\bor\b)\s*"[^"\n]*")+')
"""Texts to choose from in place of a value, as in `{"action": "search" | "finish"}`."""
NOT_JSON = re.compile(r"\s(?://|#)[^\n]*|,(?=\s*[}\]])")
"""Comments, and a comma before the end."""
KEYS = re.compile(
    r"\b(fields|keys|properties|list|lists|array|arrays):?\s+"
    r"((?:[`'\"]?\w+[`'\"]?(?:\s*,\s*(?:and\s+)?|\s+and\s+))*[`'\"]?\w+)",
    re.I,
)
"""The keys of an object, as a sentence lists them."""
PLACEHOLDER = re.compile(r"\s*(?:\.\.\.|…|<.*>|\[.*\]|\{.*\})?\s*|.*\.\.\.", re.S)


def shown_json(text: str, draw: Draw) -> str | None:
    """JSON as a prompt asks for it, by a schema or an example that it shows, or by the keys that a sentence lists; None
    for a prompt that asks for none or shows nothing of it."""
    if "json" not in text.lower() and '"properties"' not in text:
        return None
    examples = list(json_in(text)) or list(json_in(text, r'\[\s*(?=")'))
    schemas = [one for one in examples if isinstance(one, dict) and isinstance(one.get("properties"), dict)]
    quoted = ALTERNATIVES.sub(lambda match: json.dumps("|".join(re.findall('"([^"\n]*)"', match[0]))), text)
    typed = SKETCHED_TYPE.sub(
        lambda match: json.dumps({TYPE_KEY: match.lastgroup, "description": match[0]}), NOT_JSON.sub("", quoted)
    )
    sketches = list(json_in(typed))
    if schemas:
        schema = max(schemas, key=lambda one: len(json.dumps(one)))
    elif sketches or examples:
        schema = schema_of(max(sketches or examples, key=lambda one: len(json.dumps(one))))
    elif listed := KEYS.search(text):
        names = re.findall(r"\b(?!and\b)\w+", listed[2])
        lists = listed[1].lower().startswith(("list", "array"))
        kinds = {name: {"type": "array", "items": {}} if lists or is_plural(name) else {} for name in names}
        schema = {"type": "object", "properties": kinds, "required": names}
    else:
        return None
    return json.dumps(draw_value(schema, draw, text))


def is_plural(name: str) -> bool:
    return name.endswith("s") and not name.endswith("ss")


def json_in(text: str, begin: str = r"\[\s*(?=\{)|\{") -> Iterator[Any]:
    """The outermost JSON objects and lists of objects in a text, or other values that begin as `begin` says."""
    decoder, end = json.JSONDecoder(), 0
    for opening in re.finditer(begin, text):
        if opening.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except ValueError:
            continue
        if value:
            yield value


def schema_of(example: Any) -> Any:
    """The schema of an example: its values are kept, except for booleans, placeholders and options (`low|high`)."""
    if isinstance(example, bool):
        return {"type": "boolean"}
    if isinstance(example, int | float):
        return {"type": "integer" if isinstance(example, int) else "number", "default": example}
    if isinstance(example, str):
        options = [option.strip() for option in re.split(r"[|/]", example)]
        if len(options) > 1:
            short = all(re.fullmatch(r"[\w -]{1,24}", option) for option in options)
            return {"enum": options} if short else {"const": example}
        return {"type": "string"} if PLACEHOLDER.fullmatch(example) else {"type": "string", "default": example}
    if isinstance(example, list):
        return {"type": "array", "items": schema_of(example[0]) if example else {}}
    if not isinstance(example, dict):
        return {"const": example}
    if TYPE_KEY in example:
        return {"type": example[TYPE_KEY], "description": example["description"]}
    properties = {name: schema_of(value) for name, value in example.items()}
    return {"type": "object", "properties": properties, "required": list(example)}


def shown_form(prompt: str) -> str | None:
    """A text in the form that a prompt shows: labels, tags, a fenced block, a quoted example, Markdown; else None."""
    parts = [example for _, example in QUOTED_EXAMPLE.findall(prompt)]
    labels = re.findall(r"^[ \t*#-]*([A-Z][\w ]{0,30}?)\**: *([\[<{(][^\n]*)", prompt, re.M)
    labels += re.findall(r"['\"`]([A-Z][\w ]{0,30}): *([A-Z]|\d+|\.{3}|[\[<{(][^'\"`\n]*)['\"`]", prompt)
    for label, placeholder in dict.fromkeys(labels):
        parts.append(f"{label}: {filled(label, placeholder)}")
    for tag in dict.fromkeys(re.findall(r"<(\w+)>", prompt)):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", prompt, re.S)
        if content or re.search(rf"<{tag}> tags?\b", prompt):
            parts.append(f"<{tag}>{filled(tag, content[1] if content else '')}</{tag}>")
    if fence := re.search(r"```(\w*)", prompt):
        code = typical_texts(fence[1]) or ["print(1)"]
        parts.append(f"```{fence[1]}\n{code[0]}\n```")
    if not parts and re.search(r"\bmarkdown\b", prompt, re.I):
        parts.append("# Title\n\n## Section\n\n- item")
    return "\n".join(parts) or None


def filled(label: str, placeholder: str) -> str:
    """A text for the place behind a label."""
    if bounds := re.search(r"(\d+) *(?:-|–|to|\.\.) *(\d+)", placeholder):
        return bounds[2]
    options = options_in(placeholder) or [part.strip() for part in placeholder.strip("[](){}<> ").split("|")]
    if len(options) > 1:
        return options[0]
    if re.search(r"number|int|float|score|rating|^[NX\d]", placeholder, re.I):
        return "1"
    return (typical_texts(label) or ["a"])[0]
