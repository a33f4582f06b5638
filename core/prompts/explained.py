"""The parts of a text that come from the episode: from its task, and from answers before the text was first sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cotune.json_values import json_or_none, leaves
from cotune.prompts.volatile import Span, union
from cotune.records.images import content_text
from cotune.records.structs import CallRecord

WHOLE = 8
PART = 12
"""Minimum characters of a whole answer or task text (WHOLE), and of a part of one (PART), that are searched for."""
_OTHER_TASK = 20
"""Minimum characters of a text from another task: a shorter text may be a label that also occurs in prompts."""
Texts = dict[str, set[str]]
"""Texts by their first `WHOLE` characters, so that a search looks up only texts that begin like the place."""


def texts_of(tasks: Iterable[Any]) -> Texts:
    """The long texts in the inputs of all tasks: an application may remember texts from earlier episodes."""
    texts: Texts = {}
    for task in tasks:
        for leaf in strings(task):
            text = leaf.strip()
            has_words = " " in text  # a single word, such as an id, may occur in prompts by chance
            if len(text) >= _OTHER_TASK and has_words:
                texts.setdefault(text[:WHOLE], set()).add(text)
    return texts


class Explained:
    """The texts of one episode so far, and their places in other texts."""

    def __init__(self, task: Any, others: Texts) -> None:
        self._others = others
        self._texts: Texts = {}
        self._short: set[str] = set()
        """Whole texts that are too short to be searched for anywhere. They count if they fill a whole line."""
        for text in strings(task):
            self._add(text)

    def add_answer(self, call: CallRecord) -> None:
        """Add the answer of a call: its text, the text of its parts, and the arguments of its tool calls."""
        for candidate in call.candidates:
            self._add(candidate.text)
            self._add(content_text(candidate.message.get("content")))
            for key in ("reasoning_content", "reasoning", "refusal"):
                self._add(candidate.message.get(key))
            for tool in candidate.tool_calls:
                function = tool.get("function") if isinstance(tool, Mapping) else None
                self._add(function.get("arguments") if isinstance(function, Mapping) else None)

    def add_result(self, value: Any) -> None:
        """Add the result of a tool."""
        for text in strings(value):
            self._add(text)

    def spans(self, text: str) -> list[Span]:
        """The spans of `text` that come from known sources: answers, results of tools and inputs of tasks. They are no
        prompt.
        """
        spans: list[Span] = []
        # Long sources may be anywhere. They are found by their first characters.
        covered_until = 0
        for start in range(len(text) - WHOLE + 1):
            first_characters = text[start : start + WHOLE]
            sources = [*self._texts.get(first_characters, ()), *self._others.get(first_characters, ())]
            for source in sources:
                end = start + len(source)
                # A source inside a span that was found before adds nothing.
                if end > covered_until and text.startswith(source, start):
                    covered_until = end
                    spans.append((start, end))
        # A short source explains only a whole line.
        line_start = 0
        for line in text.splitlines(keepends=True):
            words = line.strip()
            if words in self._short:
                start = line_start + line.index(words)
                spans.append((start, start + len(words)))
            line_start += len(line)
        return union(spans)

    def _add(self, text: Any) -> None:
        """Remember a text as a source: the whole, each of its lines, and if it is JSON, each text in it. Anything else
        than a text is ignored."""
        if not isinstance(text, str):
            return
        self._put(text, WHOLE)
        # A short text occurs by chance inside other texts, so it explains only a whole line.
        if 0 < len(text.strip()) < WHOLE:
            self._short.add(text.strip())
        for line in text.splitlines():
            self._put(line, PART)
        looks_like_json = text.lstrip()[:1] in ("{", "[")
        if looks_like_json:
            for part in strings(json_or_none(text)):
                self._put(part, PART)
                for line in part.splitlines():
                    self._put(line, PART)

    def _put(self, text: str, least: int) -> None:
        """Remember a text with at least this number of characters."""
        stripped = text.strip()
        if len(stripped) >= least:
            self._texts.setdefault(stripped[:WHOLE], set()).add(stripped)


def strings(value: Any) -> Iterator[str]:
    """The texts in a JSON value, without its keys."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, str))
