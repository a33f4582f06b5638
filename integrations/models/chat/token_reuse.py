"""Keeps the ids of earlier prompts and replies: a prompt that goes on from them begins with exactly those ids.

A template spells a reply in its own way (a tool call's JSON, trimmed spaces). So where a message says what an earlier
reply of the role said, the reply's own text stands in its place before the texts are compared.

Paths come packed (`ids.pack_ids`): a conversation has many, each as long as itself, and they are compared as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cotune.integrations.models.chat.content import calls_of, text_of
from cotune.integrations.models.chat.tool_formats import REASONING
from cotune.records.ids import pack_ids, unpack_ids
from cotune.runtime.bounded_cache import BoundedCache

_PLACE = "\ue000reply {}\ue001"
_TAIL = 16
"""Tokens before a reply that are decoded with it, as a tokenizer may write a text otherwise at its beginning."""
_WIDTH = len(pack_ids([0]))
_OVERHEAD = 300
"""Bytes of a kept text beside itself and its path, about."""
PATHS, PATH_BYTES = 65_536, 64 << 20
"""Most paths whose texts are kept, and bytes of all of them."""
Messages = Sequence[Mapping[str, Any]]
"""Of a chat, in OpenAI form."""


class Said(NamedTuple):
    """What a reply said, and the text that the model wrote for it, without reasoning and end token."""

    said: str
    text: str


class PathTexts:
    """The texts of token paths, kept from call to call: of a conversation that grows only what is new is decoded."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.replies: BoundedCache[Said] = BoundedCache(PATHS, PATH_BYTES)
        """By the path of a reply, and the tools that were offered."""
        self._texts: BoundedCache[str] = BoundedCache(PATHS, PATH_BYTES)

    def keep(self, path: bytes, text: str) -> None:
        """Remember the text that was tokenized to a path."""
        self._texts.put(path, text, len(path) + 4 * len(text) + _OVERHEAD)

    def of(self, path: bytes, shorter: Iterable[bytes] = ()) -> str:
        """The text of a path. The first of the `shorter` ones that it goes on from saves decoding it whole."""
        if (text := self._texts.get(path)) is None:
            base = next((one for one in shorter if one and path.startswith(one)), b"")
            text = self._after(base, path)
            self.keep(path, text)
        return text

    def _after(self, base: bytes, path: bytes) -> str:
        if base and (known := self._texts.get(base)) is not None:
            tail = base[-_TAIL * _WIDTH :]
            before, both = self.decode(unpack_ids(tail)), self.decode(unpack_ids(tail + path[len(base) :]))
            if known.endswith(before) and both.startswith(before):
                return known + both[len(before) :]
        return self.decode(unpack_ids(path))


class EarlierIds:
    """Earlier token paths of one role, for one prompt; `texts` are kept from prompt to prompt.

    `parse` reads a reply (the prompt, its ids) as an assistant message, by the tools with the name `tools`.
    """

    def __init__(
        self,
        paths: Iterable[bytes],
        texts: PathTexts,
        parse: Callable[[Sequence[int], Sequence[int]], Mapping[str, Any]],
        ends: Sequence[int],
        tools: str = "",
    ) -> None:
        self.paths = sorted(filter(None, paths), key=len, reverse=True)
        self._texts = texts
        self._parse = parse
        self._ends = {pack_ids([end]): texts.decode([end]) for end in ends}
        self._tools = tools

    def longest(self, text: str) -> tuple[bytes, str]:
        """The longest path that the text begins with, and the rest of the text; no ids where there is none.

        A path that ends as no template does (another end token) is kept up to its end.
        """
        for i, path in enumerate(self.paths):
            known = self._text(i)
            if known and text.startswith(known):
                return path, text[len(known) :]
            if (end := self._ends.get(path[-_WIDTH:])) is not None:
                whole = known.removesuffix(end)
                if whole and text.startswith(tuple(whole + end for end in self._ends.values())):
                    return path[:-_WIDTH], text[len(whole) :]
        return b"", text

    def spelled(
        self, messages: Messages, template: Callable[[Messages], str], canonical: str, kept: bytes
    ) -> str | None:
        """The prompt's text with earlier replies spelled as the model wrote them, where it goes on from a longer path
        than `kept`, the one that the `canonical` text goes on from; None where there is none."""
        # 1. The longer paths, without those that are only the beginning of the longest.
        at = [i for i, path in enumerate(self.paths) if len(path) > len(kept) and path.startswith(kept)]
        replies = list(self._replies(at))
        ends = [self._text(i) for i in at if i == at[0] or not self.paths[at[0]].startswith(self.paths[i])]
        # 2. After what is kept the prompt goes on as the template writes it, or with a reply.
        so_far = len(self._text_of(kept)) if kept else 0
        begun = {canonical[so_far : so_far + 1], *(reply.text[:1] for reply in replies)}
        ends = [text for text in ends if text[so_far : so_far + 1] in begun]
        if not ends:
            return None
        # 3. The replies among the messages, each with the spellings that it may have.
        known: dict[str, list[str]] = {}
        for reply in replies:
            known.setdefault(reply.said, []).append(reply.text)
        places = [
            i for i, message in enumerate(messages) if message.get("role") == "assistant" and _said(message) in known
        ]
        if not places:
            return None
        marked = template(_placed(messages, places))
        chosen = _fitting(marked, [known[_said(messages[i])] for i in places], ends)
        if not chosen:
            return None
        if len(chosen) < len(places):
            places = places[: len(chosen)]
            marked = template(_placed(messages, places))
        if not canonical.endswith(marked.rpartition(_PLACE.format(places[-1]))[2]):
            return None
        for i, spelled in zip(places, chosen, strict=True):
            marked = marked.replace(_PLACE.format(i), spelled)
        return marked

    def _replies(self, at: Iterable[int]) -> Iterator[Said]:
        """The replies at the ends of these paths: a reply is a path that goes on from another."""
        for i in at:
            path = self.paths[i]
            prompt = next((shorter for shorter in self.paths[i + 1 :] if path.startswith(shorter)), None)
            if prompt is None or len(prompt) == len(path):
                continue
            key = (path, len(prompt), self._tools)
            found = self._texts.replies.get(key)
            if found is None:
                found = self._read(prompt, i)
                if found is None:
                    continue
                self._texts.replies.put(key, found, len(path) + 4 * len(found.said + found.text) + _OVERHEAD)
            yield found

    def _read(self, prompt: bytes, number: int) -> Said | None:
        path, text, asked = self.paths[number], self._text(number), self._text_of(prompt)
        if not text.startswith(asked):
            return None
        text = text[len(asked) :].removesuffix(self._ends.get(path[-_WIDTH:], ""))
        message = self._parse(unpack_ids(prompt), unpack_ids(path[len(prompt) :]))
        if message.get("reasoning_content"):
            text = text.partition(REASONING[1])[2].lstrip("\n")
        return Said(_said(message), text)

    def _text(self, number: int) -> str:
        """The text of a path: of the many that a long conversation has, mostly the longest alone is asked for."""
        return self._texts.of(self.paths[number], self.paths[number + 1 :])

    def _text_of(self, path: bytes) -> str:
        return self._texts.of(path, (shorter for shorter in self.paths if len(shorter) < len(path)))


def _fitting(text: str, choices: Sequence[Sequence[str]], paths: Sequence[str]) -> list[str]:
    """For each place of a marked text in turn the spelling with which one of the `paths` goes on; ends where none
    does."""
    pieces = _split(text, len(choices))
    if pieces is None:
        return []
    at, chosen, live = 0, [], list(paths)
    for piece, spellings in zip(pieces, choices, strict=False):
        live = [path for path in live if path.startswith(piece, at)]
        at += len(piece)
        fits = next((s for s in spellings if any(path.startswith(s, at) for path in live)), None)
        if fits is None:
            break
        live = [path for path in live if path.startswith(fits, at)]
        at += len(fits)
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
