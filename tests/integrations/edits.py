"""Edited prompts for tests, and what they change in a request: one text in its bytes."""

from __future__ import annotations

import json
from typing import Any

from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.templates import Template

OLD, NEW = "You are terse. Never greet.", 'Answer in "one" line.\nSay no more – ever.'


def part(old: Any, new: Any, role: str = "app", kind: Any = "system", key: str = "") -> PromptPart:
    """A part of `role`; texts are strings, or lists of strings and slot numbers."""
    pieces = [Template((text,) if isinstance(text, str) else tuple(text)) for text in (old, new)]
    return PromptPart(name=f"{role}.{kind}{key}", roles=(role,), kind=kind, key=key, old=pieces[0], new=pieces[1])


def prompts(*parts: PromptPart) -> Prompts:
    """Prompts of these parts; without any, OLD becomes NEW in the system message of `app`."""
    return Prompts(parts=parts or (part(OLD, NEW),))


def with_edit(raw: bytes, old: str = OLD, new: str = NEW) -> bytes:
    """A request's bytes with `new` in place of `old`, once."""
    texts = [json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in (old, new)]
    assert raw.count(texts[0]) == 1
    return raw.replace(texts[0], texts[1])
