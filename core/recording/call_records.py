"""A call: who makes it, its request, and the records that are made of it when it has ended.

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
from cotune.records.structs import CallRecord, CallStatus, Message, Record, Segment, Usage
from cotune.runtime.bounded_cache import BoundedCache, bytes_of

_SHORT = 512
"""Bytes of a message, or characters of a text, from which on it is remembered by its address: looking that up costs
more, keeping it less."""
OUTPUTS, OUTPUT_BYTES = 100_000, 8 << 20
"""Most answers that are kept, and most bytes of all of them."""
_OVERHEAD = 200
"""About the bytes of an entry apart from its key and value."""
HISTORIES = 16
"""Roles whose last messages are kept, to know them again in the next call."""
NAMES, NAME_BYTES = 100_000, 8 << 20
"""Most messages that are remembered as stored, and bytes of all of them; others are stored again when met."""
_FORGOTTEN = (
    f"The answers of one episode take more than {OUTPUT_BYTES >> 20} MiB: the least recently read are forgotten. "
    "A call that reads one of them is recorded without that parent."
)


class CallerContext(msgspec.Struct):
    """Who is about to make an LLM call. Scorers see `state` as `call.state`.

    A framework may leave a caller's context in a copy of the ContextVars, where a reset would be lost; so `done` is a
    flag on the shared object.
    """

    role: str
    integration: str
    state: Any = None
    read: tuple[str, ...] = ()
    """Ids that name earlier outputs this call reads (LangChain message ids); resolved to parent calls."""
    output: str | None = None
    """Id under which the framework will know this call's output."""
    scope_id: Hashable = None
    """Identity of the enclosing scope that this context stands for, where it does: equal for one scope's contexts."""
    given: bool = False
    """Whether the application itself names the role (`role`, the gateway's header): nothing overrules it."""
    thread: str | None = None
    """The LangGraph thread of the node around it, where its graph has a checkpointer."""
    nameless: tuple[object, str] | None = None
    """The agent, and where it is run, where it has no name and the role is that of every such agent."""
    model: Any = None
    """The model object whose method makes the call, if the framework's models call each other. Calls of other models
    inside are part of that call."""
    done: bool = False
    calls: int = 0
    """Calls that were made in this context."""


class SentMessage(msgspec.Struct, eq=False):
    """A message of a request, and what was found out about it when it was first sent."""

    message: Any
    address: str | None = None
    """Its content address, once a call with it has been recorded."""
    key: Hashable = None
    """Of an assistant message: its key among the answers."""


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
        """The same moment by a clock that never steps back: the latency is measured from it."""
        self.attempts: list[str] = []
        """Requests that failed before the client's retry, each as `<status>: <cause>`."""
        self.parents: tuple[str, ...] = ()
        """Calls whose outputs the messages contain, if they had ended when this one started."""
        self.prompts = ""
        """Id of the prompts that edit its role; empty where none do."""
        self.unedited = ""
        """The kind of warning for which it goes out as it was asked all the same."""
        self.edits: RoleEdits | None = None
        """The edits by which it was rewritten."""
        self.rewritten: Outgoing | None = None
        """What goes out, to a provider or to a policy, where prompts have changed the request."""
        self._take(body)

    def _take(self, body: Mapping[str, Any]) -> None:
        self.params = dict(body)
        self.messages: list[dict[str, Any]] = list(self.params.pop("messages", None) or [])
        self.sent = list(map(SentMessage, self.messages))
        self.tools: list[dict[str, Any]] | None = self.params.pop("tools", None) or None
        self.model = str(self.params.pop("model", ""))
        self.streamed = bool(self.params.pop("stream", False))


def _key(message: Mapping[str, Any]) -> Hashable:
    """Key of an assistant message: its content and tool calls, without the optional fields that clients add or drop."""
    content, tools = message.get("content") or None, message.get("tool_calls")
    if not tools and (content is None or (isinstance(content, str) and len(content) < _SHORT)):
        return (content,)
    functions = [tool.get("function") for tool in tools or []]
    calls = [(f.get("name"), f.get("arguments")) if isinstance(f, Mapping) else None for f in functions]
    return message_id({"content": content, "calls": calls})


def _is_short(key: Hashable) -> bool:
    """Whether the key is of a short text, which several roles may have said: each first knows its own."""
    return isinstance(key, tuple)


def _exact(value: Any) -> bool:
    """Whether a value that equals this one is the same JSON: not so for numbers, as 1, 1.0 and True are equal."""
    if isinstance(value, Mapping):
        return all(map(_exact, value.values()))
    return all(map(_exact, value)) if isinstance(value, list) else value is None or isinstance(value, str)


class CallRecords:
    """Makes the records of calls that have ended, in the form in which they may be stored.

    Safe from any thread. `lock` is the episode's: a call may end in the midst of either's work (garbage collection).
    """

    def __init__(
        self, redaction: Redaction | None, lock: AbstractContextManager[object], warn: Callable[[str, str], None]
    ) -> None:
        self._redaction = redaction
        self._lock = lock
        self._warn = warn
        self._answers: BoundedCache[str] = BoundedCache(OUTPUTS, OUTPUT_BYTES)
        """The calls that have ended, by what they answered (`_key`; a short text also with the role) and by the name
        that a framework gives it."""
        self._prompts = PromptTree()
        self._names: BoundedCache[str] = BoundedCache(NAMES, NAME_BYTES)
        self._histories: dict[str, list[SentMessage]] = {}
        """By role, the messages of its last call."""

    def link(self, call: PendingCall) -> None:
        """Find what the call has read, and which of its messages were sent before: of a history that only grew, just
        the new ones are looked at again. A fault of the messages costs the call its parents."""
        try:
            with self._lock:
                earlier = self._histories.pop(call.role, ())
                for position, (known, sent) in enumerate(zip(earlier, call.sent, strict=False)):
                    if known.address is None or known.message != sent.message:
                        break
                    call.sent[position] = known
                self._histories[call.role] = call.sent
                if len(self._histories) > HISTORIES:
                    del self._histories[next(iter(self._histories))]
                if self._answers.bytes:
                    # The outputs that it reads: by the framework's names, else by the assistant messages of its prompt.
                    calls = dict.fromkeys(map(self._answers.get, call.caller.read))
                    if not any(calls):
                        for sent in call.sent:
                            if sent.message.get("role") == "assistant":
                                sent.key = sent.key or _key(sent.message)
                                own = self._answers.get((call.role, sent.key)) if _is_short(sent.key) else None
                                calls[own or self._answers.get(sent.key)] = None
                    call.parents = tuple(filter(None, calls))
        except Exception as error:  # noqa: BLE001
            self._warn("unlinked_call", f"A call of role {call.role!r} has no parents: {type(error).__name__}.")

    def paths(self, role: str) -> list[bytes]:
        """Token paths of a role so far, packed: prompts, and prompts with the reply that was chosen."""
        with self._lock:
            return self._prompts.paths(role)

    def ended(self, call: PendingCall, answer: Answer | None, status: CallStatus, error: str | None) -> list[Record]:
        """The records of a call: new messages, new segments of its prompt, itself, and its candidates' rewards."""
        redacted = RedactedCall(
            messages=call.messages,
            tools=call.tools,
            params=call.params,
            attempts=call.attempts,
            error=error,
            answer=answer,
            out=call.rewritten,
        )
        if self._redaction is not None:
            redacted = self._redaction.call(redacted)
        offered = [canonical({"tools": redacted.tools})] if redacted.tools else []
        sampling = dict(redacted.answer.sampling) if redacted.answer else {}
        grammar = sampling.get("grammar")
        records: list[Record] = []
        with self._lock:
            names = self._addresses(call.sent, redacted.messages, records)
            tools = self._named(records, offered, [redacted.tools])[0] if offered else None
            out = {} if redacted.out is None else sent_fields(call, names, redacted.out, partial(self._named, records))
            if grammar:
                sampling["grammar"] = self._named(records, [canonical({"grammar": grammar})], [grammar])[0]
            prompt = None
            if answer and answer.prompt_ids:
                chosen = answer.candidates[answer.chosen].token_ids if answer.candidates else ()
                prompt, segments = self._prompts.add(call.role, answer.prompt_ids, chosen, redacted.tokens_withheld)
                records.extend(segments)
            if answer and answer.candidates:
                said = _key(answer.candidates[answer.chosen].message)
                own = (call.role, said) if _is_short(said) else None
                for key in filter(None, (call.caller.output, said, own)):
                    for _ in range(self._answers.put(key, call.id, bytes_of((key, call.id)) + _OVERHEAD)):
                        self._warn("forgotten_output", _FORGOTTEN)
        records.append(_call(call, redacted, status, names, tools, sampling, prompt, out))
        texts = answer.feedback if answer else ()
        for i, components in enumerate(answer.rewards if answer else ()):
            text = texts[i] if texts else ""
            records += reward_records(candidate_id(call.id, i), components, text, redaction=self._redaction)
        return records

    def not_recorded(self, call: PendingCall, broken: Exception) -> list[Record]:
        """What is recorded of a call whose content could not be."""
        if self._redaction is not None:
            redacted = RedactedCall(error=f"not recorded: {type(broken).__name__}", changed=True, tokens_withheld=True)
        else:
            redacted = RedactedCall(params=call.params, attempts=call.attempts, error=f"not recorded: {broken!r}")
        return [_call(call, redacted, "malformed")]

    def _addresses(self, sent: list[SentMessage], stored: list[Any], records: list[Record]) -> tuple[str, ...]:
        """The content addresses of a call's messages, as they are `stored`; new ones are added to `records`."""
        if self._redaction is not None or len(sent) != len(stored):
            return self._named(records, list(map(canonical, stored)), stored)
        known: list[str] = []
        for one in sent:  # the first ones, which `link` has found
            if one.address is None:
                break
            known.append(one.address)
        new = stored[len(known) :]
        names = self._named(records, list(map(canonical, new)), new)
        for one, name in zip(sent[len(known) :], names, strict=True):
            if _exact(one.message):
                one.address = name
        return (*known, *names)

    def _named(self, records: list[Record], encoded: list[bytes], bodies: list[Any]) -> tuple[str, ...]:
        """The content addresses of messages (their JSON and themselves); new ones are added to `records`."""
        names = []
        for raw, body in zip(encoded, bodies, strict=True):
            key = raw if len(raw) < _SHORT else address(raw)
            name = self._names.get(key)
            if name is None:
                name = key if isinstance(key, str) else address(raw)
                self._names.put(key, name, bytes_of((key, name)))
                records.append(Message(name, body))
            names.append(name)
        return tuple(names)


def _call(
    call: PendingCall,
    redacted: RedactedCall,
    status: CallStatus,
    messages: tuple[str, ...] = (),
    tools: str | None = None,
    sampling: dict[str, Any] | None = None,
    prompt: str | None = None,
    out: Mapping[str, Any] = MappingProxyType({}),
) -> CallRecord:
    answer = redacted.answer
    prompt_tokens = len(answer.prompt_ids) if answer else 0
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
        policy=answer.policy if answer else None,
        status=status,
        error=redacted.error,
        attempts=tuple(redacted.attempts),
        streamed=call.streamed,
        started=call.started,
        latency=time.monotonic() - call.began,
        usage=answer.usage if answer else Usage(),
        candidates=answer.candidates if answer else (),
        chosen=answer.chosen if answer and answer.candidates else None,
        integration=call.caller.integration,
        redacted=redacted.changed or (prompt_tokens > 0 and prompt is None),
        replayed=answer.replayed if answer else None,
        prompts=call.prompts,
        unedited=call.unedited,
        **out,
    )


class _Path(msgspec.Struct, eq=False):
    """A known path in packed form. That of a reply is made, and becomes a segment, when a later prompt continues it;
    until then it is among the `replies` of its prompt."""

    packed: bytes
    base: _Path | None
    replies: list[bytes] = []
    id: str = ""
    digest: Any = None
    """BLAKE2b over the whole path, once it is a segment."""

    def segment(self) -> Segment:
        """Take `id`, hashing only what this path adds to its base."""
        parent: str | None = None
        added, digest = self.packed, ROOT
        if self.base is not None and self.base.digest is not None:
            parent, added, digest = self.base.id, self.packed[len(self.base.packed) :], self.base.digest
        self.digest = digest.copy()
        self.digest.update(added)
        self.id = self.digest.hexdigest()
        return Segment(self.id, parent, added)


class PromptTree:
    """Known token paths by role. Not thread-safe: the episode's lock guards it."""

    def __init__(self) -> None:
        self._paths: dict[str, list[_Path]] = {}
        self._withheld: set[str] = set()
        """Segments that may not be stored."""

    def add(
        self, role: str, prompt_ids: tuple[int, ...], reply_ids: tuple[int, ...], withheld: bool = False
    ) -> tuple[str | None, list[Segment]]:
        """Extend the longest known path of `role` that `prompt_ids` starts with; remember the reply that follows.

        Returns the segment id of the whole prompt and the segments that are new. A reply is among them when the
        first prompt extends it: until then its candidate is all that is needed of it. Segments that are `withheld`, or
        extend one that was, may not be stored: they are left out, and so is the id of a prompt that needs them.
        """
        known = self._paths.setdefault(role, [])
        packed = pack_ids(prompt_ids)
        base: _Path | None = None
        for path in known:  # replies join it while it is read
            if packed.startswith(path.packed):
                if base is None or len(path.packed) > len(base.packed):
                    base = path
                if path.replies and len(path.packed) < len(packed):
                    known.extend([_Path(reply, path) for reply in path.replies])
                    path.replies.clear()
        segments: list[Segment] = []
        prompt = base
        if base is not None and not base.id:
            segments.append(base.segment())
        if prompt is None or len(prompt.packed) < len(packed):
            prompt = _Path(packed, base)
            segments.append(prompt.segment())
            known.append(prompt)
        if reply_ids and (reply := packed + pack_ids(reply_ids)) not in prompt.replies:
            prompt.replies.append(reply)
        for segment in segments if withheld or self._withheld else ():
            if withheld or segment.parent in self._withheld:
                self._withheld.add(segment.id)
        if withheld or prompt.id in self._withheld:
            return None, [segment for segment in segments if segment.id not in self._withheld]
        return prompt.id, segments

    def paths(self, role: str) -> list[bytes]:
        """The known paths of `role`, packed, longest first."""
        known = self._paths.get(role, ())
        found = {packed for path in known for packed in (path.packed, *path.replies)}
        return sorted(found, key=len, reverse=True)
