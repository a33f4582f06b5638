"""What the record of an episode explains in a text: its task, and what was answered before the text was first sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cotune.json_values import json_or_none, leaves
from cotune.prompts.volatile import Span, union
from cotune.records.images import content_text
from cotune.records.structs import CallRecord

WHOLE, PART = 8, 12
"""Least characters of a whole answer or a text of the task, and of a part of one, that count where they are found."""
_OTHER = 20
"""Least characters of a text of another task: a shorter one may be a label that prompts name, too."""
Texts = dict[str, set[str]]
"""Texts by their first characters."""


def texts_of(tasks: Iterable[Any]) -> Texts:
    """Long texts of all tasks: an application may remember those of earlier episodes."""
    found: Texts = {}
    for task in tasks:
        for text in map(str.strip, strings(task)):
            if len(text) >= _OTHER and " " in text:
                found.setdefault(text[:WHOLE], set()).add(text)
    return found


class Explained:
    """The texts of one episode so far, and where they stand in others."""

    def __init__(self, task: Any, others: Texts) -> None:
        self._others = others
        self._texts: Texts = {}
        self._short: set[str] = set()
        """Whole texts that are too short to be looked for anywhere: they count where they are a line of their own."""
        for text in strings(task):
            self._add(text)

    def answered(self, call: CallRecord) -> None:
        """Add what a call answered: its text, that of its parts, and what it asked of tools."""
        for candidate in call.candidates:
            self._add(candidate.text)
            self._add(content_text(candidate.message.get("content")))
            for key in ("reasoning_content", "reasoning", "refusal"):
                self._add(candidate.message.get(key))
            for tool in candidate.tool_calls:
                function = tool.get("function") if isinstance(tool, Mapping) else None
                self._add(function.get("arguments") if isinstance(function, Mapping) else None)

    def returned(self, value: Any) -> None:
        """Add what a tool returned."""
        for text in strings(value):
            self._add(text)

    def spans(self, text: str) -> list[Span]:
        """The places in `text` of all texts so far."""
        found: list[Span] = []
        past = 0
        for at in range(len(text) - WHOLE + 1):
            start = text[at : at + WHOLE]
            for known in (*self._texts.get(start, ()), *self._others.get(start, ())):
                if at + len(known) > past and text.startswith(known, at):
                    past = at + len(known)
                    found.append((at, past))
        at = 0
        for line in text.splitlines(keepends=True):
            if (short := line.strip()) in self._short:
                begin = at + line.index(short)
                found.append((begin, begin + len(short)))
            at += len(line)
        return union(found)

    def _add(self, text: Any) -> None:
        if not isinstance(text, str):
            return
        self._put(text, WHOLE)
        if 0 < len(text.strip()) < WHOLE:
            self._short.add(text.strip())
        for line in text.splitlines():
            self._put(line, PART)
        if text.lstrip()[:1] in ("{", "["):
            for one in strings(json_or_none(text)):
                self._put(one, PART)
                for line in one.splitlines():
                    self._put(line, PART)

    def _put(self, text: str, least: int) -> None:
        text = text.strip()
        if len(text) >= least:
            self._texts.setdefault(text[:WHOLE], set()).add(text)


def strings(value: Any) -> Iterator[str]:
    """The texts in a JSON value, without the names in it."""
    return (one for one in leaves(value) if isinstance(one, str))
