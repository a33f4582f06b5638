"""Answers calls by policies in this process; a request that continues a conversation keeps the sampled token ids.

In training and evaluation an episode knows its own earlier calls. Requests to a server, and calls of a deployed
application, come without an episode; here they are found by their messages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cotune.adapters.open_policies import LocalPolicies
from cotune.integrations.models.chat.content import text_of
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.ids import canonical, pack_ids
from cotune.records.policies import UNTRAINED
from cotune.records.structs import PolicyRef
from cotune.runtime.bounded_cache import BoundedCache, bytes_of
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.request_params import fixes_form
from cotune.sampling.responder import PolicyResponder

log = logging.getLogger("cotune")

ENTRIES, BYTES, REPLIES = 4096, 64 << 20, 64
"""Most requests, bytes of all, and replies of one request that are kept."""
_OVERHEAD = 400
"""Approximate bytes of an entry without its token ids."""
LONG = 256 << 10
"""Prompts with more bytes than this are rendered one at a time."""


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
    """Where a request stands: the packed `paths` that its prompt may go on from, and the key under which it is kept."""

    key: bytes = b""
    paths: Sequence[bytes] = ()


class Conversations:
    """Token paths by who answered (a role) and the messages. Safe to use from several threads.

    Least recently used ones go first once there are `entries` requests or `size` bytes.
    """

    def __init__(self, entries: int = ENTRIES, size: int = BYTES) -> None:
        self._turns: BoundedCache[_Turn] = BoundedCache(entries, size)

    def find(self, name: str, messages: Sequence[Mapping[str, Any]]) -> Place:
        """The place of a request to `name`, with the paths of the earlier requests and replies that it repeats.

        As in an episode, a request without a reply among its messages continues none.
        """
        try:
            keys = _keys(name, messages)
            if not any(message.get("role") == "assistant" for message in messages):
                return Place(keys[-1])
            paths: list[bytes] = []
            for i, key in enumerate(keys, start=1):
                turn = self._turns.get(key)
                if turn is not None:
                    paths += _paths(turn, messages[i] if i < len(messages) else {})
        except (TypeError, ValueError, AttributeError, RecursionError):  # no chat: rendering it raises the error
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


class LocalResponder(PolicyResponder):
    """The responder of `cotune serve` and `cotune.deployed`. It finds earlier calls by their messages.

    Prompts are rendered and replies read in threads, so that long ones delay nobody else; very long prompts, and
    requests that fix the form of their reply, whose grammars may take a second, one after the other.
    """

    reads_aside = True

    def __init__(self, local: LocalPolicies, override: Mapping[str, Any] | None = None) -> None:
        super().__init__(
            local.sampler,
            local.chat,
            {role: served.policy for role, served in local.served.items()},
            defaults=SamplingParams(max_tokens=max([local.max_model_len, *local.lengths.values()])),
            override=override,
            provider_roles=local.left_to_provider,
            others=local.others.policy if local.others else None,
            max_model_len=local.max_model_len,
            chats=local.chats,
        )
        self._local = local
        self.conversations = Conversations()
        self._names = ", ".join(local.served)
        self._long = ThreadPoolExecutor(1, "cotune-long-prompts")
        self._forms = ThreadPoolExecutor(1, "cotune-forms")
        self._places: dict[str, Place] = {}
        """By call that is being answered."""

    def longest(self, role: str) -> int:
        policy = self.policies.get(role, self.others)
        return self._local.max_model_len if policy is None else self._local.length(policy)

    async def respond(self, call: LiveCall) -> Answer | None:
        try:
            answer = await super().respond(call)
            if answer is not None:
                reply = answer.candidates[answer.chosen]
                self.conversations.keep(self._places[call.id], answer.prompt_ids, reply.message, reply.token_ids)
            return answer
        finally:
            self._places.pop(call.id, None)

    async def prepare(self, call: LiveCall) -> tuple[list[int], SamplingParams]:
        pool = self._forms if fixes_form(call.params, call.tools) else None
        if bytes_of((call.rewritten or call).messages, LONG) > LONG:
            pool = self._long
        self._places[call.id], prepared = await asyncio.get_running_loop().run_in_executor(pool, self._prepare, call)
        return prepared

    def _prepare(self, call: LiveCall) -> tuple[Place, tuple[list[int], SamplingParams]]:
        place = self.conversations.find(call.role, (call.rewritten or call).messages)
        return place, self.request(call, place.paths)

    def _policy(self, role: str) -> PolicyRef | None:
        policy = super()._policy(role)
        if self.unlisted[role] == 1:
            who = "the application's own provider"
            if policy is not None:
                who = "the untrained model" if policy == UNTRAINED else f"policy {policy}"
            log.warning("No policy here is named %r (there are: %s): %s answers.", role, self._names, who)
        return policy


def _paths(turn: _Turn, message: Mapping[str, Any]) -> list[bytes]:
    """The prompt, and with it the reply whose content `message` has; the last reply where none does, as a message
    may say it in another form."""
    if message.get("role") != "assistant" or not turn.replies:
        return [turn.prompt]
    prompt, reply = turn.replies.get(_reply_key(message)) or next(reversed(turn.replies.values()))
    return [prompt, prompt + reply]


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
