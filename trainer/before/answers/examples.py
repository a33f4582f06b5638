"""Texts in the form that a prompt shows: its largest JSON example or form, filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from cotune.trainer.before.answers.prompts import QUOTED_EXAMPLE, options_in
from cotune.trainer.before.answers.values import Draw, draw_value, typical_texts

SKETCH = re.compile(
    r'(?<=":)[ \t]*(?!"[^"\n]*"\s*[,}\]\n])(?=[^\s\[{])(?:\([^)\n]*\)|[^,\n}\]])+|(?<=\[)\s*[A-Za-z<][^,\n}\]"]*'
)
"""A value or an item that is described and not JSON, as in `{"age": integer (in years), "act": "look" | "stop"}`."""
NOT_JSON = re.compile(r"\s(?://|#)[^\n]*|,?\s*(?:\.\.\.|…)(?=\s*[}\]])|,(?=\s*[}\]])")
"""Comments, "and so on", and a comma before the end."""
TYPE = re.compile(
    r"(?P<string>string|str|text)|(?P<boolean>boolean|bool|true)"
    r"|(?P<integer>integer|int|\d+\s*(?:-|–|to)\s*\d+)|(?P<number>number|float|\d[\d.]*\s*(?:-|–|to)\s*\d)",
    re.I,
)
KEYS = re.compile(
    r"\b(fields|keys|properties|lists?|arrays?):?\s+"
    r"((?:[`'\"]?\w+[`'\"]?(?:\s*,\s*(?:and\s+)?|\s+and\s+))*[`'\"]?\w+)",
    re.I,
)
"""The keys of an object, as a sentence lists them."""
PLURAL = re.compile(r"[^s]s$")
PLACEHOLDER = re.compile(r"\s*(?:\.\.\.|…|<.*>|\[.*\]|\{.*\})?\s*|.*\.\.\.", re.S)


def shown_json(text: str, draw: Draw) -> str | None:
    """Return JSON in the form that a prompt asks for; None if the prompt does not ask for JSON or does not describe it.
    The prompt describes it by a schema or an example, or by a sentence that lists the keys."""
    if "json" not in text.lower() and '"properties"' not in text:
        return None
    # 1. The JSON in the prompt. Prompts also sketch JSON, with comments and with descriptions in place of values. To
    # read it, remove the comments and replace the descriptions. The largest example is the last.
    without_comments = NOT_JSON.sub("", text)
    with_placeholders = SKETCH.sub(as_placeholder, without_comments)
    completed = NOT_JSON.sub("", with_placeholders)
    examples = sorted([*json_in(text), *json_in(completed)], key=lambda example: len(json.dumps(example)))

    # 2. Without any JSON, the keys that a sentence lists.
    listed_keys = KEYS.search(text)
    if not examples and listed_keys is not None:
        are_lists = listed_keys[1].lower().startswith(("list", "array"))
        example: dict[str, Any] = {}
        for name in re.findall(r"\b(?!and\b)\w+", listed_keys[2]):
            example[name] = ["..."] if are_lists or PLURAL.search(name) else "..."
        examples = [example]
    if not examples:
        return None

    # 3. An example may itself be a schema, which then says more than any other example.
    schema = schema_of(examples[-1])
    for candidate in examples:
        if isinstance(candidate, dict) and isinstance(candidate.get("properties"), dict):
            schema = candidate
    return json.dumps(draw_value(schema, draw, text))


def as_placeholder(sketch: re.Match[str]) -> str:
    """A described value as a text of JSON, `<description>`; numbers and other JSON stay."""
    try:
        json.loads(sketch[0])
    except ValueError:
        return json.dumps(f"<{sketch[0].replace(chr(34), '').strip(' <>')}>")
    return sketch[0]


def json_in(text: str) -> Iterator[Any]:
    """The outermost JSON objects, and lists of objects or texts, in a text."""
    decoder = json.JSONDecoder()
    end = 0
    for opening in re.finditer(r'\[\s*(?=[{"])|\{', text):
        if opening.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except ValueError:
            continue
        if value:
            yield value


def schema_of(example: Any) -> Any:
    """A JSON schema for answers like an example that a prompt shows.

    Values of the example become constants, except booleans, placeholders such as `<name>`, and options such as
    `low|high`.
    """
    if isinstance(example, bool):
        return {"type": "boolean"}
    if isinstance(example, list):
        return {"type": "array", "items": schema_of(example[0]) if example else {}}
    if isinstance(example, dict):
        properties = {name: schema_of(value) for name, value in example.items()}
        return {"type": "object", "properties": properties, "required": list(example)}
    if not isinstance(example, str):
        return {"const": example}
    sketched = re.fullmatch("<(.*)>", example, re.S)
    text = sketched[1] if sketched else example
    kind = TYPE.match(text) if sketched else None
    if kind is not None:
        return {"type": kind.lastgroup, "description": text}  # the groups of TYPE have the names of JSON's types
    options = [option.strip() for option in re.split(r"[|/]|\bor\b" if sketched else r"[|/]", text)]
    if len(options) > 1 and all(re.fullmatch(r"[\w -]{1,24}", option) for option in options):
        return {"enum": options}
    if sketched or PLACEHOLDER.fullmatch(text):
        return {"type": "string", "description": text}
    return {"const": text}


def shown_form(prompt: str) -> str | None:
    """A text in the form that a prompt shows: labels, tags, a fenced block, a quoted example, Markdown; else None."""
    parts = [example for _, example in QUOTED_EXAMPLE.findall(prompt)]
    # 1. Labels with a placeholder or an example behind them: on a line of their own ("Score: [1-10]"), in quotes, or in
    # quotes with the description after them.
    labels = re.findall(r"^[ \t*#-]*([A-Z][\w ]{0,30}?)\**: *(?!.*</)([\[<{(][^\n]*)", prompt, re.M)
    labels += re.findall(r"['\"`]([A-Z][\w ]{0,30}): *([A-Z]|\d+|\.{3}|[\[<{(][^'\"`\n]*)['\"`]", prompt)
    labels += re.findall(r"['\"`]([A-Z][\w ]{0,30}): ?['\"`]( [^\n.]{0,60})", prompt)
    for label, placeholder in dict.fromkeys(labels):
        parts.append(f"{label}: {fill_placeholder(label, placeholder)}")
    # 2. Pairs of tags, and tags that a sentence asks for ("in <answer> tags").
    for tag in dict.fromkeys(re.findall(r"<(\w+)>", prompt)):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", prompt, re.S)
        if contents or re.search(rf"<{tag}> tags?\b", prompt):
            placeholder = contents[-1] if contents else ""
            parts.append(f"<{tag}>{fill_placeholder(tag, placeholder)}</{tag}>")
    # 3. A fenced block of code, and Markdown if nothing else is shown.
    if fence := re.search(r"```(\w*)", prompt):
        code = typical_texts(fence[1]) or ["print(1)"]
        parts.append(f"```{fence[1]}\n{code[0]}\n```")
    if not parts and re.search(r"\bmarkdown\b", prompt, re.I):
        parts.append("# Title\n\n## Section\n\n- item")
    return "\n".join(parts) or None


def fill_placeholder(label: str, placeholder: str) -> str:
    """A text to write behind a label, in place of the placeholder that a prompt shows there.

    It is the upper bound of a range, the first of several options, 1 for a number, or an example as it is. For any
    other placeholder, it is a text that is typical for the label.
    """
    if bounds := re.search(r"(\d+) *(?:-|–|to|\.\.) *(\d+)", placeholder):
        return bounds[2]
    options = options_in(placeholder) or [part.strip() for part in placeholder.strip("[](){}<> ").split("|")]
    if len(options) > 1:
        return options[0]
    if re.search(r"number|int|float|score|rating|^[NX\d]", placeholder, re.I):
        return "1"
    is_example = re.match(r"\w", placeholder) or "</" in placeholder
    if is_example:
        return placeholder
    texts = typical_texts(label) or ["a"]
    return texts[0]
