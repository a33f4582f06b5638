"""Conversations that were answered here: a later request that goes on from one keeps the ids that were sampled.

In training and evaluation an episode knows its own earlier calls. Requests to a server, and calls of a deployed
application, come without an episode; here they are found by their messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotune.ids import canonical, pack_ids, unpack_ids
from cotune.integrations.chat.token_reuse import text_of
from cotune.runtime.bounded_cache import BoundedCache

ENTRIES, BYTES, REPLIES = 4096, 64 << 20, 64
"""Most requests, bytes of all, and replies of one request that are kept."""
_OVERHEAD = 400
"""Bytes of an entry beside its token ids, about."""


@dataclass(frozen=True)
class _Turn:
    """One answered list of messages: its prompt, and each reply by its content, with the prompt it was sampled from.
    Token ids are packed."""

    prompt: bytes
    replies: dict[bytes, tuple[bytes, bytes]]

    def size(self) -> int:
        return _OVERHEAD + len(self.prompt) + sum(_OVERHEAD + len(reply) for _, reply in self.replies.values())


@dataclass(frozen=True)
class Place:
    """Where a request stands: the `paths` that its prompt may go on from, and the key under which it is kept."""

    key: bytes = b""
    paths: Sequence[tuple[int, ...]] = field(default=())


class Conversations:
    """Token paths by who answered (a role) and the messages. Safe to use from several threads.

    Least recently used ones go first once there are `entries` requests or `size` bytes.
    """

    def __init__(self, entries: int = ENTRIES, size: int = BYTES) -> None:
        self._turns: BoundedCache[_Turn] = BoundedCache(entries, size)

    def find(self, name: str, messages: Sequence[Mapping[str, Any]]) -> Place:
        """The place of a request to `name`, with the paths of the earlier requests and replies that it repeats.

        As in an episode, a request without a reply among its messages goes on from none.
        """
        try:
            keys = _keys(name, messages)
            if not any(message.get("role") == "assistant" for message in messages):
                return Place(keys[-1])
            paths: list[tuple[int, ...]] = []
            for i, key in enumerate(keys, start=1):
                turn = self._turns.get(key)
                if turn is not None:
                    paths += _paths(turn, messages[i] if i < len(messages) else {})
        except (TypeError, ValueError, AttributeError, RecursionError):  # no chat: what renders it says so
            return Place()
        return Place(keys[-1], paths)

    def keep(self, place: Place, prompt: Sequence[int], message: Mapping[str, Any], reply: Sequence[int]) -> None:
        """Keep how a request was answered: its prompt's ids, and the reply that the client got."""
        if not place.key:
            return
        turn, packed = self._turns.get(place.key), pack_ids(prompt)
        if turn is not None and turn.prompt == packed:
            packed = turn.prompt
        replies = {} if turn is None else dict(turn.replies)
        key = _reply_key(message)
        replies.pop(key, None)  # the latest reply stands last
        replies[key] = packed, pack_ids(reply)
        if len(replies) > REPLIES:
            del replies[next(iter(replies))]
        kept = _Turn(packed, replies)
        self._turns.put(place.key, kept, kept.size())

    def kept(self) -> dict[str, int]:
        """How many requests are kept, and their bytes."""
        return {"requests": len(self._turns), "bytes": self._turns.bytes}


def _paths(turn: _Turn, message: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The prompt, and with it the reply whose content `message` has; the last reply where none does, as a message
    may say it in another form."""
    if message.get("role") != "assistant" or not turn.replies:
        return [unpack_ids(turn.prompt)]
    prompt, reply = turn.replies.get(_reply_key(message)) or next(reversed(turn.replies.values()))
    return [unpack_ids(prompt), unpack_ids(prompt + reply)]


def _keys(name: str, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """One key for each number of first messages, of all that a client says in them."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    keys = []
    for message in messages:
        fields = {k: v for k, v in message.items() if v not in (None, "", [])}
        digest.update(canonical({**fields, "content": text_of(message.get("content"))}))
        keys.append(digest.copy().digest())
    return keys


def _reply_key(message: Mapping[str, Any]) -> bytes:
    """Content and calls, with the ids that the calls were given: they tell apart replies that say the same."""
    calls = [[call.get("id"), (call.get("function") or {}).get("name")] for call in message.get("tool_calls") or ()]
    content = json.dumps([text_of(message.get("content")), calls])
    return hashlib.blake2b(content.encode(), digest_size=16).digest()
