"""Answers calls with policies in this process. A continued conversation keeps the token ids that were sampled before.

In training and evaluation an episode knows its earlier calls. Requests to a server and calls of a deployed application
have no episode, so this module finds the earlier calls by their messages.
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

ENTRIES = 4096
BYTES = 64 << 20
REPLIES = 64
"""Limits of the memory of conversations: requests, bytes of all, replies to one request."""
_OVERHEAD = 400
"""Approximate bytes of an entry without its token ids."""
LONG = 256 << 10
"""Prompts with more bytes than this are rendered one at a time."""


@dataclass(frozen=True)
class _Turn:
    """The token ids of one answered list of messages. All are packed."""

    prompt: bytes
    """The latest prompt that the messages were rendered to."""
    replies: dict[bytes, tuple[bytes, bytes]]
    """Key of a reply (`_reply_key`) -> the prompt that it was sampled from, and the reply."""

    def size(self) -> int:
        return _OVERHEAD + len(self.prompt) + sum(_OVERHEAD + len(reply) for _, reply in self.replies.values())


@dataclass(frozen=True)
class Place:
    """The place of a request among the conversations."""

    key: bytes = b""
    """The key to keep the request under; empty if it cannot be kept."""
    paths: Sequence[bytes] = ()
    """Packed token ids of earlier prompts and replies that the request's prompt may continue."""


class Conversations:
    """Token paths by role and messages. Safe to use from several threads.

    Beyond `entries` requests or `size` bytes, the least recently used ones are removed.
    """

    def __init__(self, entries: int = ENTRIES, size: int = BYTES) -> None:
        self._turns: BoundedCache[_Turn] = BoundedCache(entries, size)

    def find(self, name: str, messages: Sequence[Mapping[str, Any]]) -> Place:
        """Find the earlier requests to `name` that a request continues, because it begins with all their messages.

        Returns the key under which `keep` stores this request, and the paths of the earlier ones: the token ids of
        their prompts, with and without the replies, with which this request's prompt may begin.
        """
        try:
            keys = _prefix_keys(name, messages)
            key_of_request = keys[-1]
            # As in an episode, a request without a reply among its messages continues no earlier request.
            if not any(message.get("role") == "assistant" for message in messages):
                return Place(key_of_request)
            paths: list[bytes] = []
            for n_messages, key in enumerate(keys, start=1):
                turn = self._turns.get(key)
                if turn is not None:
                    next_message = messages[n_messages] if n_messages < len(messages) else {}
                    paths += _paths(turn, next_message)
        except (TypeError, ValueError, AttributeError, RecursionError):
            # The messages are malformed: rendering them raises an error that says so.
            return Place()
        return Place(key_of_request, paths)

    def keep(self, place: Place, prompt: Sequence[int], message: Mapping[str, Any], reply: Sequence[int]) -> None:
        """Keep an answered request: the token ids of its prompt, and the reply that the client got.

        `message` is the reply as the client sends it back, `reply` its token ids.
        """
        if not place.key:
            return  # its messages were malformed
        previous = self._turns.get(place.key)
        packed_prompt = pack_ids(prompt)
        if previous is not None and previous.prompt == packed_prompt:
            packed_prompt = previous.prompt  # one object for all replies, to save memory
        replies = {} if previous is None else dict(previous.replies)
        key = _reply_key(message)
        replies.pop(key, None)  # the latest reply stands last
        replies[key] = packed_prompt, pack_ids(reply)
        if len(replies) > REPLIES:
            del replies[next(iter(replies))]
        turn = _Turn(packed_prompt, replies)
        self._turns.put(place.key, turn, turn.size())

    def kept(self) -> dict[str, int]:
        """Number of requests in memory, and their bytes."""
        return {"requests": len(self._turns), "bytes": self._turns.bytes}


class LocalResponder(PolicyResponder):
    """The responder of `cotune serve` and `cotune.deployed`. It finds earlier calls by their messages.

    It renders prompts and parses replies in threads, so that long ones do not delay other requests. Very long prompts
    are rendered one after the other. So are requests that fix the form of their reply: a grammar may take a second.
    """

    reads_aside = True

    def __init__(self, local: LocalPolicies, override: Mapping[str, Any] | None = None) -> None:
        """Answer served calls with opened policies, and continue their conversations.

        `override` replaces sampling parameters of the requests. Long prompts and forms of answers each have a thread of
        their own: preparing them takes seconds, during which short requests must go on.
        """
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
        """Call id -> place, for calls in progress."""

    def longest(self, role: str) -> int:
        policy = self.policies.get(role, self.others)
        return self._local.max_model_len if policy is None else self._local.length(policy)

    async def respond(self, call: LiveCall) -> Answer | None:
        """The answer to a call, which is remembered: a later prompt that repeats it reuses its tokens."""
        try:
            answer = await super().respond(call)
            if answer is not None:
                reply = answer.candidates[answer.chosen]
                self.conversations.keep(self._places[call.id], answer.prompt_ids, reply.message, reply.token_ids)
            return answer
        finally:
            self._places.pop(call.id, None)

    async def prepare(self, call: LiveCall) -> tuple[list[int], SamplingParams]:
        """The prompt and the sampling parameters of a call, prepared in a thread.

        One thread renders all long prompts, and one prepares all replies of a fixed form, so that neither delay the
        other calls.
        """
        call_as_sent = call.rewritten or call  # with edited prompts, if it has any
        messages = call_as_sent.messages
        is_long = bytes_of(messages, most=LONG) > LONG
        if is_long:
            pool: ThreadPoolExecutor | None = self._long
        elif fixes_form(call.params, call.tools):
            pool = self._forms
        else:
            pool = None  # asyncio's default pool

        def find_and_render() -> tuple[Place, tuple[list[int], SamplingParams]]:
            place = self.conversations.find(call.role, messages)
            return place, self.request(call, place.paths)

        self._places[call.id], prepared = await asyncio.get_running_loop().run_in_executor(pool, find_and_render)
        return prepared

    def _policy(self, role: str) -> PolicyRef | None:
        """The policy that answers a role. Logs a warning at the first call of a role that has no policy here."""
        policy = super()._policy(role)
        if self.unlisted[role] == 1:
            if policy is None:
                answerer = "the application's own provider"
            elif policy == UNTRAINED:
                answerer = "the untrained model"
            else:
                answerer = f"policy {policy}"
            log.warning("No policy here is named %r (there are: %s): %s answers.", role, self._names, answerer)
        return policy


def _paths(turn: _Turn, next_message: Mapping[str, Any]) -> list[bytes]:
    """The packed token ids of a turn that a later request repeats: its prompt, and its prompt with the reply.

    `next_message` follows the turn's messages in the request. If it is a reply, its content tells which of the turn's
    replies it repeats. A client may have changed the content; then it is taken for the latest reply.
    """
    if next_message.get("role") != "assistant" or not turn.replies:
        return [turn.prompt]
    latest = next(reversed(turn.replies.values()))
    prompt, reply = turn.replies.get(_reply_key(next_message), latest)
    return [prompt, prompt + reply]


def _prefix_keys(name: str, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A key for each prefix of the messages, from all their fields: the first message, the first two, and so on."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    keys = []
    for message in messages:
        # Clients send an empty field or leave it out.
        fields = {field: value for field, value in message.items() if value not in (None, "", [])}
        digest.update(canonical({**fields, "content": text_of(message.get("content"))}))
        keys.append(digest.copy().digest())
    return keys


def _reply_key(message: Mapping[str, Any]) -> bytes:
    """A key from the content and the tool calls. Ids of tool calls distinguish replies of equal content."""
    calls = [[call.get("id"), (call.get("function") or {}).get("name")] for call in message.get("tool_calls") or ()]
    content = json.dumps([text_of(message.get("content")), calls])
    return hashlib.blake2b(content.encode(), digest_size=16).digest()
