"""Redaction: functions of the user change each message before it is stored."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cotune.errors import CotuneError, WorkflowError
from cotune.json_values import plain
from cotune.recording.edits import Outgoing
from cotune.records.answers import Answer
from cotune.records.images import split_images
from cotune.records.structs import Candidate, Task
from cotune.runtime.bounded_cache import BoundedCache
from cotune.user_objects import load_object, takes

log = logging.getLogger("cotune")

Redactor = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A message in, the message to store out. What is no chat message comes as one too: see `docs/how-to/privacy.md`."""

_FINISHED = {"stop", "length", "tool_calls", "function_call", "content_filter", "interrupted", "unknown"}
"""Finish reasons that are none of a provider's own making."""
FAILED = "[redaction failed]"
WITHHELD = "[redacted]"
"""In place of a grammar that holds redacted text, of the hash of a redacted image, and of a task's id that is its text
where redactors leave none."""
_KEPT, _MOST = 100_000, 16 << 20
"""Messages, and bytes of them, whose redaction an episode keeps; older ones are redacted again."""
_json = msgspec.json.Encoder(enc_hook=plain)
"""Values that JSON does not have are encoded as the store does it."""


class RedactedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What may be stored of a call."""

    messages: list[dict[str, Any]] = []
    tools: Any = None
    params: dict[str, Any] = {}
    attempts: list[str] = []
    error: str | None = None
    answer: Answer | None = None
    out: Outgoing | None = None
    """What went out, where prompts have changed the request."""
    changed: bool = False
    """Whether anything differs from the request and the answer."""
    tokens_withheld: bool = False
    """Whether the token ids of its prompt may not be stored."""


def check_redactor(fn: Any) -> Redactor:
    """`fn` itself. Raises WorkflowError unless it is a plain function of one argument."""
    name = getattr(fn, "__name__", repr(fn))
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        raise WorkflowError(f"The redactor {name} is not a plain function.", "Define it as: def redact(message): ...")
    if not takes(fn, 1):
        remedy = "Define it as: def redact(message): ... and return the message to store."
        raise WorkflowError(f"The redactor {name} does not take one argument.", remedy)
    return fn  # type: ignore[no-any-return]


def load_redactor(spec: str) -> Redactor:
    """Import `module:function` or `file.py:function`. Raises ConfigError if it does not exist, WorkflowError
    if it is not a redactor."""
    return check_redactor(load_object("redact", spec, "privacy:hide"))


def each_text(fn: Callable[[str], str]) -> Redactor:
    """A redactor that puts every text of a message through `fn`, however deep it lies; `role` and keys stay."""

    def redact(message: dict[str, Any]) -> dict[str, Any]:
        return {key: value if key == "role" else _each(value, fn) for key, value in message.items()}

    return redact


def _each(value: Any, fn: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: _each(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each(item, fn) for item in value]
    return value


@functools.cache
def _say(kind: str, text: str) -> None:
    """Log a warning of no episode, once per process."""
    log.warning("%s", text)


@dataclass
class Redaction:
    """The redactors of one episode, applied in order, each message once. One that raises stores `FAILED`, and `warn`
    counts it."""

    redactors: Sequence[Redactor]
    keep_token_ids: bool = False
    warn: Callable[[str, str], None] = _say
    _done: BoundedCache[tuple[dict[str, Any], bool]] = field(default_factory=lambda: BoundedCache(_KEPT, _MOST))

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What to store of a message; the message itself is not touched."""
        return self._seen(message)[0]

    def changes(self, message: Mapping[str, Any]) -> bool:
        """Whether a message is stored in another form."""
        return self._seen(message)[1]

    def content(self, role: str, content: Any) -> Any:
        """What to store of something that is no message: redactors see it as the content of a message of this role."""
        return self.message(self._as_message(role, content)).get("content")

    def task(self, task: Task) -> Task:
        """What to store of a task. One that is a text may have it as its id too, which never is empty."""
        shown = self.content("task", task.input)
        same = isinstance(task.input, str) and task.id == task.input
        return Task(id=str(shown or WITHHELD) if same else task.id, input=shown)

    def error(self, error: CotuneError) -> CotuneError:
        """An error of an episode, as it may be shown: its cause is an error text."""
        cause = self.text(error.cause) or ""
        if cause == error.cause:
            return error
        redacted = copy.copy(error)
        redacted.cause, redacted.args = cause, (f"{cause} {error.remedy}".strip(),)
        return redacted

    def text(self, text: str | None, role: str = "error") -> str | None:
        """What to store of a text that is no message, such as an error's; None where redactors leave no content."""
        content = None if text is None else self.content(role, text)
        return None if content is None else str(content)

    def table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """What to store of request parameters."""
        if not table or not self.changes(self._as_message("params", dict(table))):
            return dict(table)  # as it is: JSON would make lists of its tuples
        found = self.content("params", dict(table))
        return found if isinstance(found, dict) else {"redacted": found}

    def call(self, call: RedactedCall) -> RedactedCall:
        """What may be stored of a call that has ended, from the call as it is."""
        tools = self._as_message("tools", call.tools) if call.tools else None
        messages = [self._seen(message) for message in call.messages]
        out = None if call.out is None else self._out(call.out)
        tokens_withheld = any(changed for _, changed in messages) or (tools is not None and self.changes(tools))
        tokens_withheld = tokens_withheld or out != call.out
        params, error = self.table(call.params), self.text(call.error)
        formed = params != call.params or (tools is not None and self.changes(tools)) or out != call.out
        shown = [stored for stored, _ in messages] if out is None else out.messages
        answer = None if call.answer is None else self._answer(call.answer, formed, shown)
        changed = tokens_withheld or answer != call.answer or params != call.params or error != call.error
        if changed and answer is not None:  # the likeliest tokens may tell a hidden text
            bare = tuple(msgspec.structs.replace(candidate, shown=None) for candidate in answer.candidates)
            answer = msgspec.structs.replace(answer, candidates=bare)
        return RedactedCall(
            messages=[message for message, _ in messages],
            tools=None if tools is None else self.message(tools).get("content"),
            params=params,
            attempts=[self.text(attempt) or "" for attempt in call.attempts],
            error=error,
            answer=answer,
            out=out,
            changed=changed,
            tokens_withheld=tokens_withheld and not self.keep_token_ids,
        )

    def _out(self, out: Outgoing) -> Outgoing:
        """What to store of what went out."""
        tools = self._as_message("tools", out.tools) if out.tools else None
        return Outgoing(
            messages=list(map(self.message, out.messages)),
            tools=None if tools is None else self.message(tools).get("content"),
            params=self.table(out.params),
        )

    def _answer(self, answer: Answer, formed: bool, messages: Sequence[dict[str, Any]]) -> Answer:
        """What to store of an answer to a prompt that is stored as `messages`. `formed`: a redactor changed what the
        grammar was made of.

        Token ids cannot be trained on without their grammar, so they go with it.
        """
        candidates = tuple(self._candidate(candidate) for candidate in answer.candidates)
        sampling = self.table(answer.sampling)
        if grammar := answer.sampling.get("grammar"):
            keep = self.keep_token_ids or not (formed or sampling.get("grammar") != grammar)
            sampling["grammar"] = grammar if keep else WITHHELD
            if not keep:
                candidates = tuple(msgspec.structs.replace(c, token_ids=(), logprobs=()) for c in candidates)
        if images := answer.sampling.get("images"):
            kept = {image.id for message in messages for image in split_images(message)[1]}
            sampling["images"] = [image if image in kept else WITHHELD for image in images]
        return msgspec.structs.replace(answer, candidates=candidates, sampling=sampling)

    def _candidate(self, candidate: Candidate) -> Candidate:
        if candidate.finish_reason not in _FINISHED:
            finish = str(self.content("finish_reason", candidate.finish_reason))
            candidate = msgspec.structs.replace(candidate, finish_reason=finish)
        message = self._as_message("assistant", candidate.message.get("content"))
        message.update(candidate.message)
        text = message if candidate.text == message["content"] else self._as_message("assistant", candidate.text)
        if not self.changes(message) and not self.changes(text):
            return candidate
        stored = self.message(text).get("content")
        changed = msgspec.structs.replace(
            candidate, message=self.message(message), text=stored if isinstance(stored, str) else FAILED
        )
        return changed if self.keep_token_ids else msgspec.structs.replace(changed, token_ids=(), logprobs=())

    def _as_message(self, role: str, content: Any) -> dict[str, Any]:
        return {"role": role, "content": content}

    def _seen(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The message to store, and whether it differs. Redactors see the message as JSON, as it would be stored."""
        try:
            raw = _json.encode(message)
        except Exception:  # noqa: BLE001
            return self._failed(message, "it is no JSON"), True
        name = hashlib.blake2b(raw, digest_size=16).digest()
        if (known := self._done.get(name)) is None:
            found = self._redact(raw)
            known = found, found != msgspec.json.decode(raw)
            self._done.put(name, known, len(raw))
        return known

    def _redact(self, raw: bytes) -> dict[str, Any]:
        message = msgspec.json.decode(raw)
        try:
            found: Any = message
            for redactor in self.redactors:
                found = redactor(found)
                if not isinstance(found, Mapping):
                    raise TypeError("no message")
            stored: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
            return stored
        except Exception as error:  # noqa: BLE001
            return self._failed(message, f"the redactor raised {type(error).__name__}")

    def _failed(self, message: Mapping[str, Any], why: str) -> dict[str, Any]:
        role = str(message.get("role", "unknown"))
        self.warn("redaction_failed", f"A message of role {role!r} is stored as {FAILED}: {why}.")
        return {"role": role, "content": FAILED}
