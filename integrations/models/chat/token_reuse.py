"""Reuses the ids of earlier prompts and replies, so that a prompt that continues them begins with exactly these ids.

A template writes a reply in its own way (the JSON of a tool call, trimmed spaces). Therefore, if a message repeats an
earlier reply of the role, the reply's own text is put in its place before the texts are compared.

Paths are packed (`ids.pack_ids`), because a conversation has many, each as long as the conversation, and they are
compared as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cotune.integrations.models.chat.content import calls_of, text_of
from cotune.integrations.models.chat.tool_formats import REASONING
from cotune.records.ids import pack_ids, unpack_ids
from cotune.runtime.bounded_cache import BoundedCache

_MARK = "\ue000reply {}\ue001"
"""Stands for a reply with this number in a rendered prompt. Its first and last characters are for private use."""
_TAIL_TOKENS = 16
"""Number of tokens before a reply that are decoded with it. A tokenizer may decode a token differently at the beginning
of a text."""
_ID_BYTES = len(pack_ids([0]))
"""Bytes of a packed token id."""
_OVERHEAD = 300
"""About the bytes of a cached text without the text and its path."""
PATHS = 65_536
PATH_BYTES = 64 << 20
"""Limits of the cache of texts: number of paths, and bytes of all of them."""
Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat, in OpenAI form."""


class Reply(NamedTuple):
    """A reply: its meaning, and the text that the model wrote, without reasoning and end token."""

    meaning: str
    """Content, reasoning and calls in a form to compare (`_comparable_message`)."""
    text: str


class PathTexts:
    """The texts of token paths, cached from call to call, so that only the new part of a conversation is decoded."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.replies: BoundedCache[Reply] = BoundedCache(PATHS, PATH_BYTES)
        """(path of a reply, length of its prompt, name of the tools) -> the reply."""
        self._texts: BoundedCache[str] = BoundedCache(PATHS, PATH_BYTES)

    def keep(self, path: bytes, text: str) -> None:
        """Remember the text that was tokenized to a path."""
        self._texts.put(path, text, len(path) + 4 * len(text) + _OVERHEAD)

    def of(self, path: bytes, shorter: Iterable[bytes] = ()) -> str:
        """The text of a path. If it continues one of the `shorter` paths, only its new part is decoded."""
        if (text := self._texts.get(path)) is None:
            base = next((other for other in shorter if other and path.startswith(other)), b"")
            text = self._decode_after(base, path)
            self.keep(path, text)
        return text

    def _decode_after(self, base: bytes, path: bytes) -> str:
        """The text of a path of packed token ids, from the text of its beginning `base` if this is cached."""
        # Decode the new ids together with the last ids of the base, and remove the text of the latter again. The last
        # ids may have another text when ids follow, such as a character in several tokens: then all ids are decoded.
        if base and (base_text := self._texts.get(base)) is not None:
            tail = base[-_TAIL_TOKENS * _ID_BYTES :]
            before = self.decode(unpack_ids(tail))
            both = self.decode(unpack_ids(tail + path[len(base) :]))
            if base_text.endswith(before) and both.startswith(before):
                return base_text + both[len(before) :]
        return self.decode(unpack_ids(path))


class EarlierIds:
    """Earlier token paths of one role, for one prompt. `texts` is shared by all prompts.

    `parse` reads a reply as an assistant message, from its prompt and its ids. `tools` names the tools that it uses.
    """

    def __init__(
        self,
        paths: Iterable[bytes],
        texts: PathTexts,
        parse: Callable[[Sequence[int], Sequence[int]], Mapping[str, Any]],
        ends: Sequence[int],
        tools: str = "",
    ) -> None:
        """The earlier prompts and replies of a conversation that a new prompt may continue.

        Args:
            paths: packed token ids of earlier prompts, with and without their replies.
            texts: the cached texts of paths.
            parse: reads a reply as an assistant message, from the ids of its prompt and its own ids.
            ends: token ids that end a reply.
            tools: names the offered tools, on which parsing depends.
        """
        self.paths = sorted(filter(None, paths), key=len, reverse=True)
        self._texts = texts
        self._parse = parse
        self._end_token_texts = {pack_ids([end]): texts.decode([end]) for end in ends}
        self._tools = tools

    def longest(self, text: str) -> tuple[bytes, str]:
        """The longest path whose text is the beginning of a prompt's `text`, and the remaining text; an empty path if
        there is none.

        A path may end with another end token than the template writes. Then it is used without its end token.
        """
        # The paths are sorted, longest first, so the first match is the longest.
        for i, path in enumerate(self.paths):
            path_text = self._text(i)
            if path_text and text.startswith(path_text):
                return path, text[len(path_text) :]
            end_token_text = self._end_token_texts.get(path[-_ID_BYTES:])
            if end_token_text is None:
                continue
            without_end = path_text.removesuffix(end_token_text)
            with_any_end = tuple(without_end + end for end in self._end_token_texts.values())
            if without_end and text.startswith(with_any_end):
                # The remaining text still begins with the template's end token.
                return path[:-_ID_BYTES], text[len(without_end) :]
        return b"", text

    def text_with_own_replies(
        self, messages: Messages, template: Callable[[Messages], str], canonical: str, reused: bytes
    ) -> str | None:
        """The text of a prompt in which earlier replies are written as the model wrote them.

        `template` renders messages. `canonical` is the text that it writes for the prompt's `messages`, and `reused` is
        the longest path with whose text `canonical` begins. None if the text with the model's own replies would not
        begin with a longer path.
        """
        longer_paths = [i for i, path in enumerate(self.paths) if len(path) > len(reused) and path.startswith(reused)]
        replies = list(self._replies(longer_paths))
        path_texts = self._possible_texts(longer_paths, replies, canonical, reused)
        if not path_texts:
            return None
        texts_of_reply = _texts_of_repeated_replies(messages, replies)
        if not texts_of_reply:
            return None  # no message repeats a reply of the model

        # A reply of one meaning may have several texts. Render the prompt with marks instead of the repeated replies,
        # and choose the texts that the prompt begins with like a path.
        positions = list(texts_of_reply)
        marked = template(_with_marks(messages, positions))
        chosen = _matching_texts(marked, list(texts_of_reply.values()), path_texts)
        if not chosen:
            return None
        if len(chosen) < len(positions):
            # The later replies are not in the path: the template writes them.
            positions = positions[: len(chosen)]
            marked = template(_with_marks(messages, positions))
        # After a mark, a template may write the next messages in another way than after the reply.
        _, _, after_last_reply = marked.rpartition(_MARK.format(positions[-1]))
        if not canonical.endswith(after_last_reply):
            return None
        text = marked
        for position, reply_text in zip(positions, chosen, strict=True):
            text = text.replace(_MARK.format(position), reply_text)
        return text

    def _possible_texts(
        self, numbers: Sequence[int], replies: Sequence[Reply], canonical: str, reused: bytes
    ) -> list[str]:
        """The texts of paths that the prompt with the text `canonical` may continue, the longest first.

        `numbers` are the numbers of all paths that are longer than the path `reused` and begin with it, and `replies`
        are their replies. Most of these paths cannot be continued, and are left out by cheap comparisons.
        """
        if not numbers:
            return []
        longest_path = self.paths[numbers[0]]
        texts = []
        for i in numbers:
            # The text of the longest path contains the texts of its own beginnings.
            begins_longest = i != numbers[0] and longest_path.startswith(self.paths[i])
            if not begins_longest:
                texts.append(self._text(i))
        # After the reused text, a path must continue as the template does, or with a reply. The first character rules
        # out most paths.
        end = len(self._text_of(reused)) if reused else 0
        next_characters = {canonical[end : end + 1], *(reply.text[:1] for reply in replies)}
        return [text for text in texts if text[end : end + 1] in next_characters]

    def _replies(self, numbers: Iterable[int]) -> Iterator[Reply]:
        """The replies at the ends of the paths with these numbers. A path with a reply begins with another path, which
        is its prompt.
        """
        for i in numbers:
            path = self.paths[i]
            prompt = next((shorter for shorter in self.paths[i + 1 :] if path.startswith(shorter)), None)
            if prompt is None or len(prompt) == len(path):
                continue  # it has no reply
            key = (path, len(prompt), self._tools)
            reply = self._texts.replies.get(key)
            if reply is None:
                reply = self._read_reply(prompt, i)
                if reply is None:
                    continue
                self._texts.replies.put(key, reply, len(path) + 4 * len(reply.meaning + reply.text) + _OVERHEAD)
            yield reply

    def _read_reply(self, prompt: bytes, path_number: int) -> Reply | None:
        """The reply after `prompt` in the path with this number; None if the text of the path does not begin with the
        prompt's text.

        A path is the packed token ids of an earlier prompt and its reply. The text of the reply has no reasoning and no
        end token, because applications send it back without them.
        """
        path = self.paths[path_number]
        path_text = self._text(path_number)
        prompt_text = self._text_of(prompt)
        if not path_text.startswith(prompt_text):
            return None
        last_token = path[-_ID_BYTES:]
        end_token_text = self._end_token_texts.get(last_token, "")
        reply_text = path_text[len(prompt_text) :].removesuffix(end_token_text)
        reply_ids = unpack_ids(path[len(prompt) :])
        message = self._parse(unpack_ids(prompt), reply_ids)
        if message.get("reasoning_content"):
            _, end_of_reasoning = REASONING
            _, _, after_reasoning = reply_text.partition(end_of_reasoning)
            reply_text = after_reasoning.lstrip("\n")
        return Reply(_comparable_message(message), reply_text)

    def _text(self, number: int) -> str:
        """The text of a path. It is decoded only when needed: mostly, only the longest of many paths is."""
        return self._texts.of(self.paths[number], self.paths[number + 1 :])

    def _text_of(self, path: bytes) -> str:
        return self._texts.of(path, (shorter for shorter in self.paths if len(shorter) < len(path)))


def _matching_texts(marked: str, texts_of_reply: Sequence[Sequence[str]], path_texts: Sequence[str]) -> list[str]:
    """Choose a text for each reply of a prompt, so that the prompt's text begins like one of the `path_texts`.

    `marked` is the prompt's text with marks instead of replies, `texts_of_reply` has the possible texts of each reply.
    The list ends before the first reply with which the prompt differs from every path.
    """
    pieces = _split_at_marks(marked, len(texts_of_reply))
    if pieces is None:
        return []
    position = 0
    chosen: list[str] = []
    matching = list(path_texts)  # the texts that are equal to the prompt's text up to `position`
    for piece, reply_texts in zip(pieces, texts_of_reply, strict=False):
        matching = [text for text in matching if text.startswith(piece, position)]
        position += len(piece)
        fitting = [reply for reply in reply_texts if any(text.startswith(reply, position) for text in matching)]
        if not fitting:
            break
        reply_text = fitting[0]
        matching = [text for text in matching if text.startswith(reply_text, position)]
        position += len(reply_text)
        chosen.append(reply_text)
    return chosen


def _texts_of_repeated_replies(messages: Messages, replies: Iterable[Reply]) -> dict[int, list[str]]:
    """For each message that repeats a reply, by its position: the texts that this reply may have."""
    texts_of_meaning: dict[str, list[str]] = {}
    for reply in replies:
        texts_of_meaning.setdefault(reply.meaning, []).append(reply.text)
    texts_at: dict[int, list[str]] = {}
    for position, message in enumerate(messages):
        if message.get("role") == "assistant":
            texts = texts_of_meaning.get(_comparable_message(message))
            if texts is not None:
                texts_at[position] = texts
    return texts_at


def _with_marks(messages: Messages, places: Sequence[int]) -> list[dict[str, Any]]:
    """The messages with a mark in place of content and calls of the replies in these places."""
    marked = [dict(message) for message in messages]
    for i in places:
        marked[i].pop("tool_calls", None)
        marked[i]["content"] = _MARK.format(i)
    return marked


def _split_at_marks(text: str, count: int) -> list[str] | None:
    """The text around the marks; None unless the template shows each mark exactly once."""
    head, _, _ = _MARK.partition("{}")
    first, *parts = text.split(head)
    pieces = [first, *(part.partition("\ue001")[2] for part in parts)]
    return pieces if len(pieces) == count + 1 else None


def _comparable_message(message: Mapping[str, Any]) -> str:
    """Content, reasoning and calls of an assistant message, independent of optional fields and the spelling of JSON."""
    reasoning = (message.get("reasoning_content") or "").strip()
    return json.dumps([text_of(message.get("content")), reasoning, calls_of(message)])
