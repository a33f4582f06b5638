"""Keeps the ids of earlier prompts and replies: a prompt that goes on from them begins with exactly those ids.

A template spells a reply in its own way (a tool call's JSON, trimmed spaces). So where a message says what an earlier
reply of the role said, the reply's own text stands in its place before the texts are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cotune.integrations.models.chat.content import calls_of, text_of
from cotune.integrations.models.chat.tool_formats import REASONING

_PLACE = "\ue000reply {}\ue001"
Path = Sequence[int]
Messages = Sequence[Mapping[str, Any]]
"""Of a chat, in OpenAI form."""


class EarlierIds:
    """Earlier token paths of one role, with their texts as far as they are looked at; built for one prompt."""

    def __init__(
        self,
        paths: Iterable[Path],
        decode: Callable[[list[int]], str],
        parse: Callable[[Sequence[int], Sequence[int]], Mapping[str, Any]],
        ends: Sequence[int],
    ) -> None:
        self.paths = sorted((list(path) for path in paths), key=len, reverse=True)
        self._decode = decode
        self._parse = parse
        self._ends = ends
        self._texts: dict[int, str] = {}
        self._end_texts = tuple(decode([end]) for end in ends)

    def longest(self, text: str) -> tuple[list[int], str]:
        """The longest path that the text begins with, and the rest of the text; no ids where there is none.

        A path that ends as no template does (another end token) is kept up to its end.
        """
        for i, path in enumerate(self.paths):
            known = self._text(i)
            if known and text.startswith(known):
                return path, text[len(known) :]
            if path and path[-1] in self._ends:
                whole = known.removesuffix(self._decode(path[-1:]))
                if whole and text.startswith(tuple(whole + end for end in self._end_texts)):
                    return path[:-1], text[len(whole) :]
        return [], text

    def spelled(self, messages: Messages, template: Callable[[Messages], str], canonical: str) -> str | None:
        """The prompt's text with earlier replies spelled as the model wrote them; None where that changes nothing."""
        known: dict[str, list[str]] = {}
        for said, text in self._replies():
            known.setdefault(said, []).append(text)
        at = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and _said(message) in known]
        if not at:
            return None
        choices = [known[_said(messages[i])] for i in at]
        chosen = self._fitting(template(_placed(messages, at)), choices)
        if not chosen:
            return None
        at = at[: len(chosen)]
        text = template(_placed(messages, at))
        end = text.rpartition(_PLACE.format(at[-1]))[2]
        if not canonical.endswith(end):
            return None
        for i, spelled in zip(at, chosen, strict=True):
            text = text.replace(_PLACE.format(i), spelled)
        return text

    def _replies(self) -> Iterator[tuple[str, str]]:
        """What each reply said (a path that goes on from another), and the text that the model wrote for it, without
        reasoning and end token."""
        for i, path in enumerate(self.paths):
            shorter = enumerate(self.paths[i + 1 :], i + 1)
            prompt = next(((p, self._text(at)) for at, p in shorter if p and path[: len(p)] == p), None)
            if prompt is None or not self._text(i).startswith(prompt[1]):
                continue
            ids, text = path[len(prompt[0]) :], self._text(i)[len(prompt[1]) :]
            if not ids:
                continue
            if ids[-1] in self._ends:
                text = text.removesuffix(self._decode(ids[-1:]))
            message = self._parse(prompt[0], ids)
            if message.get("reasoning_content"):
                text = text.partition(REASONING[1])[2].lstrip("\n")
            yield _said(message), text

    def _text(self, number: int) -> str:
        """The text of a path: of the many that a long conversation has, mostly the longest alone is asked for."""
        if number not in self._texts:
            self._texts[number] = self._decode(self.paths[number])
        return self._texts[number]

    def _fitting(self, text: str, choices: Sequence[Sequence[str]]) -> list[str]:
        """For each place in turn the spelling with which an earlier path goes on; ends where none does."""
        pieces = _split(text, len(choices))
        if pieces is None:
            return []
        so_far, chosen, texts = "", [], [self._text(i) for i in range(len(self.paths))]
        for piece, spellings in zip(pieces, choices, strict=False):
            so_far += piece
            fits = next((s for s in spellings if any(known.startswith(so_far + s) for known in texts)), None)
            if fits is None:
                break
            so_far += fits
            chosen.append(fits)
        return chosen


def _placed(messages: Messages, at: Sequence[int]) -> list[dict[str, Any]]:
    """The messages with a mark in place of what the replies at `at` said after their reasoning."""
    marked = [dict(message) for message in messages]
    for i in at:
        marked[i] = {k: v for k, v in marked[i].items() if k != "tool_calls"} | {"content": _PLACE.format(i)}
    return marked


def _split(text: str, count: int) -> list[str] | None:
    """The text around the marks; None where the template shows one not exactly once."""
    head, _, _ = _PLACE.partition("{}")
    first, *rest = text.split(head)
    pieces = [first, *(part.partition("\ue001")[2] for part in rest)]
    return pieces if len(pieces) == count + 1 else None


def _said(message: Mapping[str, Any]) -> str:
    """What an assistant message says, whatever optional fields a client adds or drops and however it spells JSON."""
    reasoning = (message.get("reasoning_content") or "").strip()
    return json.dumps([text_of(message.get("content")), reasoning, calls_of(message)])
