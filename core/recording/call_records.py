"""A call: its caller, its request, and its records when it has ended.

An episode stores each message, and each segment of a prompt's tokens, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from cotune.prompts.edits import RoleEdits
from cotune.recording.edits import Outgoing, sent_fields
from cotune.recording.redaction import RedactedCall, Redaction
from cotune.recording.rewards import reward_records
from cotune.records.answers import Answer
from cotune.records.ids import ROOT, address, candidate_id, canonical, message_id, new_id, pack_ids
from cotune.records.structs import CallRecord, CallStatus, Candidate, Message, Record, Segment
from cotune.runtime.bounded_cache import BoundedCache, bytes_of

_SHORT = 512
"""Size of a message in bytes, or of a text in characters, from which it is remembered by its hash. A hash takes more
time but less memory."""
OUTPUTS = 100_000
OUTPUT_BYTES = 8 << 20
"""Maximum number of answers that are remembered, and their maximum size in bytes."""
_OVERHEAD = 200
"""Estimated size in bytes of an entry without its key and value."""
HISTORIES = 16
"""Maximum number of roles whose last messages are remembered, to recognize them in the next call."""
NAMES = 100_000
NAME_BYTES = 8 << 20
"""Maximum number of messages that are remembered as stored, and their maximum size in bytes. Other messages are stored
again when they occur again."""
_FORGOTTEN = (
    f"The answers of one episode take more than {OUTPUT_BYTES >> 20} MiB: the least recently read are forgotten. "
    "A call that reads one of them is recorded without that parent."
)


class CallerContext(msgspec.Struct):
    """The caller of an LLM call that is about to be made. Scorers see `state` as `call.state`.

    A framework may leave a caller's context in a copy of the ContextVars, where a reset would be lost; so `done` is a
    flag on the shared object.
    """

    role: str
    integration: str
    state: Any = None
    read: tuple[str, ...] = ()
    """Ids of earlier outputs that this call reads (LangChain message ids); resolved to parent calls."""
    output: str | None = None
    """Id that the framework will give to this call's output."""
    scope_id: Hashable = None
    """Identity of the enclosing scope, if this context stands for one. All contexts of a scope have the same."""
    given: bool = False
    """Whether the application itself names the role (`role`, the gateway's header). Then nothing overrides it."""
    thread: str | None = None
    """The LangGraph thread of the enclosing node, if its graph has a checkpointer."""
    nameless: tuple[object, str] | None = None
    """For an agent without a name, whose role all agents without a name share: the agent, and the place that runs
    it."""
    model: Any = None
    """The model object whose method makes the call, if the framework's models call each other. Calls of other models
    inside are part of this call."""
    done: bool = False
    calls: int = 0
    """Number of calls that were made in this context."""


class SentMessage(msgspec.Struct, eq=False):
    """A message of a request, with values that were computed when it was first sent."""

    message: Any
    address: str | None = None
    """Its content address, after a call with it has been recorded."""
    key: Hashable = None
    """For an assistant message, its key among the answers."""


class PendingCall:
    """A chat request of one role in an episode: a call before its answer."""

    __slots__ = (
        "attempts", "began", "caller", "edits", "episode_id", "id", "messages", "model", "params", "parents", "prompts",
        "rewritten", "role", "sent", "started", "step", "streamed", "tools", "turn", "unedited",
    )  # fmt: skip

    def __init__(self, episode_id: str, caller: CallerContext, step: int, turn: int, body: Mapping[str, Any]) -> None:
        """`body` is a chat request in OpenAI form; `step` and `turn` count from 0, see `records.CallRecord`."""
        self.id = new_id()
        self.episode_id = episode_id
        self.role = caller.role
        self.caller = caller
        self.step = step
        self.turn = turn
        self.started = time.time()
        """Seconds since the epoch."""
        self.began = time.monotonic()
        """The start by `time.monotonic`, which never steps back, to measure the latency."""
        self.attempts: list[str] = []
        """Requests that failed before the client's retry, each as `<status>: <cause>`."""
        self.parents: tuple[str, ...] = ()
        """Calls whose outputs the messages contain, if they ended before this call started."""
        self.prompts = ""
        """Id of the prompts that edit its role; empty without edits."""
        self.unedited = ""
        """The kind of warning if the call is sent unedited although its role has edits; else empty."""
        self.edits: RoleEdits | None = None
        """The edits that changed the request."""
        self.rewritten: Outgoing | None = None
        """The request that is sent to a provider or a policy, if edits changed it."""
        self._take(body)

    def _take(self, body: Mapping[str, Any]) -> None:
        """Take the messages, tools and parameters of a chat request."""
        self.params = dict(body)
        self.messages: list[dict[str, Any]] = list(self.params.pop("messages", None) or [])
        self.sent = list(map(SentMessage, self.messages))
        self.tools: list[dict[str, Any]] | None = self.params.pop("tools", None) or None
        self.model = str(self.params.pop("model", ""))
        self.streamed = bool(self.params.pop("stream", False))


def _key(message: Mapping[str, Any]) -> Hashable:
    """A key that is equal for an answer and for the same answer as an assistant message in a later prompt.

    It is made from the content and the tool calls. Optional fields, which clients add or drop, are ignored. The key of
    a short text is a tuple with the text, any other key is a hash.
    """
    content = message.get("content") or None
    tool_calls = message.get("tool_calls") or []
    is_short_text = content is None or (isinstance(content, str) and len(content) < _SHORT)
    if is_short_text and not tool_calls:
        return (content,)
    calls: list[tuple[Any, Any] | None] = []
    for tool_call in tool_calls:
        function = tool_call.get("function")
        if isinstance(function, Mapping):
            calls.append((function.get("name"), function.get("arguments")))
        else:
            calls.append(None)
    return message_id({"content": content, "calls": calls})


def _is_short(key: Hashable) -> bool:
    """Whether a key of `_key` is of a short text, which is then in the key itself."""
    return isinstance(key, tuple)


def _is_exact_json(value: Any) -> bool:
    """Whether Python's `==` finds only values with the same JSON as this one, so that `==` can stand for comparing the
    JSON. Values with numbers do not qualify, because 1, 1.0 and True are equal."""
    if isinstance(value, Mapping):
        return all(map(_is_exact_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact_json, value))
    return value is None or isinstance(value, str)


class CallRecords:
    """Creates the records of calls that have ended, in the form that may be stored.

    Safe from any thread. `lock` is the lock of the episode: the garbage collector may end a call during the work of
    either.
    """

    def __init__(
        self, redaction: Redaction | None, lock: AbstractContextManager[object], warn: Callable[[str, str], None]
    ) -> None:
        """`redaction` changes values before they are stored (None: store them as they are); `warn` counts a warning by
        kind and logs its text."""
        self._redaction = redaction
        self._lock = lock
        self._warn = warn
        self._answering_calls: BoundedCache[str] = BoundedCache(OUTPUTS, OUTPUT_BYTES)
        """The id of the call that gave an answer, to find the parents of later calls. It is found by three kinds of
        keys: the answer's content (`_key`), for a short text also the pair of the role and this key, and the id that a
        framework gave to the answer."""
        self._prompts = PromptTree()
        self._known_addresses: BoundedCache[str] = BoundedCache(NAMES, NAME_BYTES)
        """The content address of each message or other body that was stored, so that it is not stored again. The key of
        a short body is its JSON, the key of a long one the address itself."""
        self._histories: dict[str, list[SentMessage]] = {}
        """The messages of each role's last call."""

    def link(self, call: PendingCall) -> None:
        """Set `parents` of a call, the calls whose answers it read, and recognise messages that its role sent before.

        If a message is broken, the call is recorded without parents.
        """
        try:
            with self._lock:
                self._reuse_messages(call)
                call.parents = self._find_parents(call)
        except Exception as error:  # noqa: BLE001
            self._warn("unlinked_call", f"A call of role {call.role!r} has no parents: {type(error).__name__}.")

    def _reuse_messages(self, call: PendingCall) -> None:
        """In `call.sent`, replace the messages at the beginning that the role's last call sent too with the objects of
        that call.

        These have their content address and their key, so that a long history is not hashed again for each call.
        """
        # Taken out and put back at the end, so that the first role in the dictionary is the least recently used.
        history = self._histories.pop(call.role, ())
        for position, (earlier, sent) in enumerate(zip(history, call.sent, strict=False)):
            if earlier.address is None or earlier.message != sent.message:
                break
            call.sent[position] = earlier
        self._histories[call.role] = call.sent
        if len(self._histories) > HISTORIES:
            del self._histories[next(iter(self._histories))]

    def _find_parents(self, call: PendingCall) -> tuple[str, ...]:
        """Ids of the calls whose answers a call reads.

        The framework may have named these answers by its own ids (`call.caller.read`). Otherwise they are found by the
        assistant messages of the prompt.
        """
        if len(self._answering_calls) == 0:
            return ()
        parents = [self._answering_calls.get(output_id) for output_id in call.caller.read]
        has_named_parent = any(parent is not None for parent in parents)
        if not has_named_parent:
            for sent in call.sent:
                if sent.message.get("role") != "assistant":
                    continue
                if sent.key is None:
                    sent.key = _key(sent.message)
                parent = None
                if _is_short(sent.key):
                    # Several roles may give a short answer such as "yes": the role's own is the likelier one.
                    parent = self._answering_calls.get((call.role, sent.key))
                if parent is None:
                    parent = self._answering_calls.get(sent.key)
                parents.append(parent)
        return tuple(dict.fromkeys(parent for parent in parents if parent is not None))

    def paths(self, role: str) -> list[bytes]:
        """Token paths of a role so far, packed: prompts, and prompts followed by the chosen reply."""
        with self._lock:
            return self._prompts.paths(role)

    def records_of(
        self, call: PendingCall, answer: Answer | None, status: CallStatus, error: str | None
    ) -> list[Record]:
        """The records of a call that has ended: new messages, new segments of its prompt, the call, and its candidates'
        rewards.

        Redactors change everything first. Ids are hashes of the redacted form, because a hash of the original would let
        a reader check guesses of the hidden text. The chosen answer is remembered, to find the calls that read it
        later.
        """
        redacted = self._redacted(call, answer, error)

        # 1. Parts that several calls may share are stored once: messages, tools, a grammar, and the tokens of the
        #    prompt. The record of the call has only their ids. Long lists of tools are encoded outside the lock,
        #    because this takes time.
        encoded_tools = canonical({"tools": redacted.tools}) if redacted.tools else b""
        sampling = dict(redacted.answer.sampling) if redacted.answer else {}
        records: list[Record] = []
        with self._lock:
            message_ids = self._message_addresses(call.sent, redacted.messages, records)
            tools_id = None
            if encoded_tools:
                (tools_id,) = self._body_addresses(records, [encoded_tools], [redacted.tools])
            sent_request: dict[str, Any] = {}
            if redacted.edited_request is not None:
                store_bodies = partial(self._body_addresses, records)
                sent_request = sent_fields(call, message_ids, redacted.edited_request, store_bodies)
            if grammar := sampling.get("grammar"):
                encoded_grammar = canonical({"grammar": grammar})
                (sampling["grammar"],) = self._body_addresses(records, [encoded_grammar], [grammar])
            prompt_id = None
            if answer and answer.prompt_ids:
                reply_ids = answer.candidates[answer.chosen].token_ids if answer.candidates else ()
                withheld = redacted.tokens_withheld
                prompt_id, segments = self._prompts.add(call.role, answer.prompt_ids, reply_ids, withheld)
                records.extend(segments)
            if answer and answer.candidates:
                self._remember_answer(call, answer.candidates[answer.chosen])

        # 2. The call and its rewards.
        record = _call_record(
            call,
            redacted,
            status,
            messages=message_ids,
            tools=tools_id,
            sampling=sampling,
            prompt=prompt_id,
            sent_request=sent_request,
        )
        records.append(record)
        if answer is not None:
            for i, components in enumerate(answer.rewards):
                text = answer.feedback[i] if answer.feedback else ""
                records += reward_records(candidate_id(call.id, i), components, text, redaction=self._redaction)
        return records

    def _redacted(self, call: PendingCall, answer: Answer | None, error: str | None) -> RedactedCall:
        """The parts of a call that has ended, in the form that may be stored."""
        parts = RedactedCall(
            messages=call.messages,
            tools=call.tools,
            params=call.params,
            attempts=call.attempts,
            error=error,
            answer=answer,
            edited_request=call.rewritten,
        )
        return parts if self._redaction is None else self._redaction.call(parts)

    def _remember_answer(self, call: PendingCall, chosen: Candidate) -> None:
        """Remember which call gave this answer, by every key under which `_find_parents` may look for it."""
        answer_key = _key(chosen.message)
        keys = [answer_key]
        if call.caller.output:
            keys.append(call.caller.output)
        if _is_short(answer_key):
            keys.append((call.role, answer_key))
        for key in keys:
            n_removed = self._answering_calls.put(key, call.id, bytes_of((key, call.id)) + _OVERHEAD)
            for _ in range(n_removed):
                self._warn("forgotten_output", _FORGOTTEN)

    def records_without_content(self, call: PendingCall, broken: Exception) -> list[Record]:
        """The record of a call whose content could not be recorded."""
        if self._redaction is not None:
            redacted = RedactedCall(error=f"not recorded: {type(broken).__name__}", changed=True, tokens_withheld=True)
        else:
            redacted = RedactedCall(params=call.params, attempts=call.attempts, error=f"not recorded: {broken!r}")
        return [_call_record(call, redacted, "malformed")]

    def _message_addresses(self, sent: list[SentMessage], stored: list[Any], records: list[Record]) -> tuple[str, ...]:
        """The content addresses of a call's messages. `sent` are the messages as the application sent them, `stored`
        the same messages in the form that may be stored. Messages that are not stored yet are added to `records`."""
        # The stored messages are others than the sent ones after redaction, and if a scorer has changed the list, which
        # it sees as `call.messages`. Then addresses of sent messages are of no use.
        are_others = self._redaction is not None or len(sent) != len(stored)
        if are_others:
            return self._body_addresses(records, list(map(canonical, stored)), stored)

        # The first messages may be from an earlier call, which has set their addresses (`_reuse_messages`).
        known_addresses: list[str] = []
        for message in sent:
            if message.address is None:
                break
            known_addresses.append(message.address)

        new_messages = sent[len(known_addresses) :]
        new_bodies = stored[len(known_addresses) :]
        new_addresses = self._body_addresses(records, list(map(canonical, new_bodies)), new_bodies)
        for message, new_address in zip(new_messages, new_addresses, strict=True):
            # Later calls reuse the address for a message that is equal by `==`. That is right only if this message
            # also has the same JSON.
            if _is_exact_json(message.message):
                message.address = new_address
        return (*known_addresses, *new_addresses)

    def _body_addresses(self, records: list[Record], encoded: list[bytes], bodies: list[Any]) -> tuple[str, ...]:
        """The content addresses of messages, tools or other bodies. `encoded` is the JSON of each body.

        A body that has not been stored in this episode is added to `records`.
        """
        addresses: list[str] = []
        for raw, body in zip(encoded, bodies, strict=True):
            # A short body is found by its JSON, because hashing it takes longer. The key of a long one is its address.
            key = raw if len(raw) < _SHORT else address(raw)
            body_address = self._known_addresses.get(key)
            if body_address is None:
                body_address = address(raw) if isinstance(key, bytes) else key
                self._known_addresses.put(key, body_address, bytes_of((key, body_address)))
                records.append(Message(body_address, body))
            addresses.append(body_address)
        return tuple(addresses)


def _call_record(
    call: PendingCall,
    redacted: RedactedCall,
    status: CallStatus,
    messages: tuple[str, ...] = (),
    tools: str | None = None,
    sampling: dict[str, Any] | None = None,
    prompt: str | None = None,
    sent_request: Mapping[str, Any] = MappingProxyType({}),
) -> CallRecord:
    """The record of a call that has ended.

    `messages`, `tools` and `prompt` are content addresses. `sent_request` has the fields of the request that was sent,
    if edits of the prompts changed it (`sent_fields`). The arguments after `status` are left out for a call whose
    content could not be recorded.
    """
    answer = redacted.answer or Answer(candidates=())  # a failed call may have no answer
    prompt_tokens = len(answer.prompt_ids)
    # A prompt with tokens but without an id has segments that may not be stored.
    is_prompt_withheld = prompt_tokens > 0 and prompt is None
    return CallRecord(
        id=call.id,
        episode=call.episode_id,
        role=call.role,
        step=call.step,
        turn=call.turn,
        parents=call.parents,
        messages=messages,
        tools=tools,
        model=call.model,
        params=redacted.params,
        sampling=sampling or {},
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        policy=answer.policy,
        status=status,
        error=redacted.error,
        attempts=tuple(redacted.attempts),
        streamed=call.streamed,
        started=call.started,
        latency=time.monotonic() - call.began,
        usage=answer.usage,
        candidates=answer.candidates,
        chosen=answer.chosen if answer.candidates else None,
        integration=call.caller.integration,
        redacted=redacted.changed or is_prompt_withheld,
        replayed=answer.replayed,
        prompts=call.prompts,
        unedited=call.unedited,
        **sent_request,
    )


class _Path(msgspec.Struct, eq=False):
    """A token path: the token ids of a prompt, or of a prompt and its reply, packed into bytes.

    A reply stays among the `replies` of its prompt until a later prompt may continue it. Then it gets a path of its
    own, which becomes a segment if the prompt does continue it.
    """

    packed: bytes
    base: _Path | None
    """The longest earlier path that this one begins with."""
    replies: list[bytes] = []
    """Replies to this prompt, each as the packed ids of the prompt and the reply."""
    id: str = ""
    """Id of its segment; empty if it is not stored as one."""
    digest: Any = None
    """BLAKE2b over the whole path, after it became a segment."""

    def become_segment(self) -> Segment:
        """Set the `id` and the `digest` of this path, and return the segment to store, which has only the tokens after
        the base.

        The id is a hash of all tokens of the path. It continues the hash of the base, so that only the added tokens are
        hashed.
        """
        if self.base is None or self.base.digest is None:
            parent_id = None
            parent_digest = ROOT  # the hash of no tokens
            added = self.packed
        else:
            parent_id = self.base.id
            parent_digest = self.base.digest
            added = self.packed[len(self.base.packed) :]
        self.digest = parent_digest.copy()
        self.digest.update(added)
        self.id = self.digest.hexdigest()
        return Segment(self.id, parent_id, added)


def _longest_prefix(paths: list[_Path], packed: bytes) -> _Path | None:
    """The longest of a role's token `paths` that is a prefix of a prompt; None without one. `packed` are the prompt's
    packed token ids.

    A prompt that is longer than an earlier one may continue a reply to it. So these replies get paths of their own,
    which are appended to `paths`.
    """
    longest: _Path | None = None
    for path in paths:  # the loop also visits the replies that it appends
        if not packed.startswith(path.packed):
            continue
        if longest is None or len(path.packed) > len(longest.packed):
            longest = path
        if path.replies and len(path.packed) < len(packed):
            paths.extend([_Path(reply, path) for reply in path.replies])
            path.replies.clear()
    return longest


class PromptTree:
    """The token paths of each role. Not thread-safe: the episode's lock guards it."""

    def __init__(self) -> None:
        self._paths: dict[str, list[_Path]] = {}
        self._withheld: set[str] = set()
        """Segments that may not be stored."""

    def add(
        self, role: str, prompt_ids: tuple[int, ...], reply_ids: tuple[int, ...], withheld: bool = False
    ) -> tuple[str | None, list[Segment]]:
        """Store a prompt as an extension of an earlier path of `role` (a prompt, or a prompt with its reply), so that
        only the added tokens are stored as segments. Remember the reply, which a later prompt may extend.

        Returns the segment id of the whole prompt and the new segments. A reply becomes a segment when the first prompt
        extends it; until then its candidate is enough. If the segments are `withheld`, or extend a withheld segment,
        they may not be stored: they are left out, and so is the id of a prompt that needs them.
        """
        # 1. Find the longest earlier path that the prompt extends.
        paths = self._paths.setdefault(role, [])
        packed = pack_ids(prompt_ids)
        base = _longest_prefix(paths, packed)

        # 2. Make the new segments, and remember the reply.
        segments: list[Segment] = []
        if base is not None and not base.id:  # a reply that no prompt has extended before
            segments.append(base.become_segment())
        if base is not None and base.packed == packed:  # the same prompt again
            prompt = base
        else:
            prompt = _Path(packed, base)
            segments.append(prompt.become_segment())
            paths.append(prompt)
        if reply_ids:
            reply = packed + pack_ids(reply_ids)
            if reply not in prompt.replies:
                prompt.replies.append(reply)

        # 3. Leave out segments that may not be stored. A segment that extends one of them may not be stored either.
        for segment in segments:
            if withheld or segment.parent in self._withheld:
                self._withheld.add(segment.id)
        if withheld or prompt.id in self._withheld:
            return None, [segment for segment in segments if segment.id not in self._withheld]
        return prompt.id, segments

    def paths(self, role: str) -> list[bytes]:
        """The paths of `role`, packed, longest first."""
        packed: set[bytes] = set()
        for path in self._paths.get(role, ()):
            packed.update((path.packed, *path.replies))
        return sorted(packed, key=len, reverse=True)
