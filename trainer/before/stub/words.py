"""Texts for made-up answers from the prompt and the tools: names and words that exist, JSON that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cotune.integrations.models.chat.content import text_of
from cotune.trainer.before.stub.fitting import AS_IT_FITS, Manner, choices_in
from cotune.trainer.before.stub.json_example import example

_WORD = re.compile(r"\b[A-Z][A-Z_]{3,}\b")
_QUOTED = re.compile(r"""(?<!\w)['"`]([A-Za-z][\w -]{1,23})['"`](?!\w)""")
_COMMON = frozenset(
    {"ALWAYS", "NEVER", "MUST", "ONLY", "SHOULD", "DO_NOT", "IMPORTANT", "CRITICAL", "REQUIRED", "WARNING", "NOTE"}
    | {"NOTES", "YOUR", "THIS", "THAT", "WITH", "WILL", "FROM", "HAVE", "WHEN", "EACH", "MORE", "THAN", "THEN", "TODO"}
    | {"JSON", "YAML", "HTML", "HTTP", "HTTPS", "MARKDOWN", "TEXT", "NULL", "NONE", "TRUE", "FALSE", "FORMAT", "INPUT"}
    | {"OUTPUT", "TASK", "TASKS", "CONTEXT", "RULE", "RULES", "EXAMPLE", "EXAMPLES", "SYSTEM", "USER", "ROLE", "GOAL"}
    | {"QUESTION", "ANSWER"}
)
"""Words in capitals that stress or name something, and are no answers."""
_TYPE = "sketched type"
_MOST = 8
"""Most words that are taken from one prompt."""
_SKETCHED = re.compile(
    r"(?<=[:\[])\s*<?(?:(?P<string>string|str|text)|(?P<boolean>boolean|bool|true or false)"
    r"|(?P<integer>integer|int|\d+\s*(?:-|–|to)\s*\d+)|(?P<number>number|float|\d[\d.]*\s*(?:-|–|to)\s*\d[\d.]*))\b>?"
    r"(?:\s*\([^)\n]*\))?[^,\n}\]]*",
    re.I,
)
"""A type or a range in the place of a value, as in `{"age": integer (in years), "score": 1-5}`."""
_ALTERNATIVES = re.compile(r'"[^"\n]*"(?:\s*(?:\||/|\bor\b)\s*"[^"\n]*")+')
"""Texts to choose from in the place of a value, as in `{"action": "search" | "finish"}`."""
_REMARK = re.compile(r"\s(?://|#)[^\n]*|,(?=\s*[}\]])")
"""Parts of JSON in a prompt that are no JSON: remarks, and a comma before the end."""
_KEYS = re.compile(
    r"\b(?:fields|keys|properties)\b:?\s+((?:[`'\"]?\w+[`'\"]?(?:\s*,\s*(?:and\s+)?|\s+and\s+))+[`'\"]?\w+)", re.I
)
"""The keys of an object, as a sentence lists them."""
_BLANK = re.compile(r"\s*(?:\.\.\.|…|<.*>|\[.*\]|\{.*\})?\s*|.*\.\.\.", re.S)
"""A text of an example that stands for another."""
_NAMES = re.compile(r"agent|worker|recipient|assignee|delegate|member|team|target|expert|specialist|role\b|^to$", re.I)
"""Parameters of tools that hand over to somebody, who is listed in the tool's description."""
_LISTED = re.compile(r"^\s*[-*•]\s*[`'\"]?([\w][\w -]{0,40}?)[`'\"]?\s*(?:\(|:|–|—|$)", re.M)
_FOLLOWING = re.compile(r"(?:following|available|one of)[^:\n]{0,60}:[ \t]*([^\n.]+)", re.I)


def choices_of(messages: Sequence[Mapping[str, Any]], names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Words that a prompt may expect as an answer: the application's `names` that it lists (if several), words that it
    writes in capitals or quotes, and `words` that the application is known to wait for."""
    text = prompt_text(messages)
    offered = listed(text, names)
    asked = [word for word in _WORD.findall(text) if word not in _COMMON]
    asked += choices_in(text)
    asked += [word for word in _QUOTED.findall(text) if word.upper() not in _COMMON]
    found = dict.fromkeys([*(offered if len(offered) > 1 else ()), *list(dict.fromkeys(asked))[:_MOST], *words])
    return list(found)


def listed(text: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that stand in a text."""
    return [name for name in dict.fromkeys(names) if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The application's own words in a prompt: its system messages, and the last message."""
    own = [message for message in messages if message.get("role") in ("system", "developer")]
    last = [message for message in messages[-1:] if message not in own]
    return "\n".join(text_of(message.get("content")) for message in (*own, *last))


def asked_json(
    messages: Sequence[Mapping[str, Any]], variant: int, names: Sequence[str] = (), manner: Manner = AS_IT_FITS
) -> str | None:
    """JSON as a prompt asks for it in words: by a schema that it shows or sketches, else an example of its own; None
    without. `names` are those of the application's parts."""
    text = prompt_text(messages)
    if "json" not in text.lower() and '"properties"' not in text:
        return None
    offered = listed(text, names)
    shown = list(_objects(text)) or list(_objects(text, r'\[\s*(?=")'))
    schema = next(
        (one for one in reversed(shown) if isinstance(one, dict) and isinstance(one.get("properties"), dict)), None
    )
    sketched = _ALTERNATIVES.sub(lambda found: json.dumps("|".join(re.findall('"([^"\n]*)"', found[0]))), text)
    sketched = _SKETCHED.sub(
        lambda found: json.dumps({_TYPE: found.lastgroup, "description": found[0]}), _REMARK.sub("", sketched)
    )
    if schema is None and (sketches := list(_objects(sketched))) not in ([], shown):
        schema = _schema_of(sketches[-1])
    if schema is not None:
        return json.dumps(example(schema, variant, names=offered, manner=manner))
    if not shown and (named := _KEYS.search(text)):
        keys = re.findall(r"\b(?!and\b)\w+", named[1])
        lists = {key: {"type": "array", "items": {}} for key in keys if key.endswith("s") and not key.endswith("ss")}
        schema = {"type": "object", "properties": {key: lists.get(key, {}) for key in keys}, "required": keys}
        return json.dumps(example(schema, variant, names=offered, manner=manner))
    return json.dumps(example(_schema_of(shown[-1]), variant, names=offered, manner=manner)) if shown else None


def _schema_of(sketch: Any) -> Any:
    """The schema of an example in which `_SKETCHED` has found types. A value stays as it is, but for a boolean, a place
    to be filled in (`...`), and words to choose from (`low|high`)."""
    if isinstance(sketch, bool):
        return {"type": "boolean"}
    if isinstance(sketch, int | float):
        return {"type": "integer" if isinstance(sketch, int) else "number", "default": sketch}
    if isinstance(sketch, str) and len(words := [word.strip() for word in re.split(r"[|/]", sketch)]) > 1:
        return {"enum": words} if all(re.fullmatch(r"[\w -]{1,24}", word) for word in words) else {"const": sketch}
    if isinstance(sketch, str):
        return {"type": "string"} if _BLANK.fullmatch(sketch) else {"type": "string", "default": sketch}
    if isinstance(sketch, list):
        return {"type": "array", "items": _schema_of(sketch[0]) if sketch else {}}
    if not isinstance(sketch, dict):
        return {"const": sketch}
    if _TYPE in sketch:
        return {"type": sketch[_TYPE], "description": sketch["description"]}
    return {"type": "object", "properties": {k: _schema_of(v) for k, v in sketch.items()}, "required": list(sketch)}


def names_in(function: Mapping[str, Any], names: Sequence[str]) -> tuple[str, list[str]]:
    """The parameter of a tool that names who is next, and the names that the tool knows; empty for other tools."""
    schema = function.get("parameters") or {}
    for name, part in (schema.get("properties") or {}).items():
        if not isinstance(part, Mapping) or part.get("enum") or part.get("type", "string") != "string":
            continue
        text = f"{function.get('description') or ''}\n{part.get('description') or ''}"
        known = [one for one in dict.fromkeys(names) if one in text]
        if _NAMES.search(name) and (found := known or _listed(text)):
            return name, found
    return "", []


def _listed(text: str) -> list[str]:
    found = _FOLLOWING.search(text)
    inline = [part.strip(" `'\"") for part in re.split(r",|;|\bor\b|\band\b", found[1])] if found else []
    return list(dict.fromkeys([*_LISTED.findall(text), *(part for part in inline if part)]))


def _objects(text: str, begin: str = r"\[\s*(?=\{)|\{") -> Iterator[Any]:
    """The outermost JSON objects and lists of objects in a text, or the values that begin as `begin` says."""
    decoder, end = json.JSONDecoder(), 0
    for opened in re.finditer(begin, text):
        if opened.start() < end:
            continue
        try:
            found, end = decoder.raw_decode(text, opened.start())
        except ValueError:
            continue
        if found:
            yield found


def functions_in(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions that a message calls, each with `name` and `arguments`."""
    return [tool.get("function") or {} for tool in message.get("tool_calls") or ()]


def message_text(message: Mapping[str, Any]) -> str:
    """Text of a message, with the names and arguments of its tool calls."""
    called = "".join(f"{one.get('name')}{one.get('arguments')}" for one in functions_in(message))
    return text_of(message.get("content")) + called
