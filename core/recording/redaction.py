"""Redaction: the user's functions change each message before it is stored."""

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
"""Takes a message and returns the message to store. Other values are passed as messages too: see
`docs/how-to/privacy.md`."""

_FINISHED = {"stop", "length", "tool_calls", "function_call", "content_filter", "interrupted", "unknown"}
"""Standard finish reasons. Others are a provider's own texts."""
FAILED = "[redaction failed]"
WITHHELD = "[redacted]"
"""Replaces a grammar that holds redacted text, the hash of a redacted image, and a task's id that is its text if
redactors leave no text."""
_MESSAGES = 100_000
_MESSAGE_BYTES = 16 << 20
"""Maximum number of messages, and maximum size in bytes, whose redaction an episode remembers. Older messages are
redacted again."""
_json = msgspec.json.Encoder(enc_hook=plain)
"""Encodes values that JSON does not have like the store."""


class RedactedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a call that may be stored."""

    messages: list[dict[str, Any]] = []
    tools: Any = None
    params: dict[str, Any] = {}
    attempts: list[str] = []
    error: str | None = None
    answer: Answer | None = None
    edited_request: Outgoing | None = None
    """The request that was sent, if edits changed it."""
    changed: bool = False
    """Whether anything differs from the request and the answer."""
    tokens_withheld: bool = False
    """Whether the token ids of its prompt may not be stored."""


def check_redactor(fn: Any) -> Redactor:
    """Return `fn`. Raises WorkflowError unless it is a plain function of one argument."""
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
    """A redactor that applies `fn` to every text in a message, at any depth. `role` and keys stay."""

    def redact(message: dict[str, Any]) -> dict[str, Any]:
        return {key: value if key == "role" else _map_texts(value, fn) for key, value in message.items()}

    return redact


def _map_texts(value: Any, fn: Callable[[str], str]) -> Any:
    """A value of JSON with `fn` applied to every text in it, at any depth. Keys stay as they are."""
    if isinstance(value, str):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, fn) for item in value]
    return value


@functools.cache
def _warn_once_outside(kind: str, text: str) -> None:
    """Log a warning outside an episode, once per process."""
    log.warning("%s", text)


@dataclass
class Redaction:
    """The redactors of one episode, applied in order, once to each message. If a redactor raises, `FAILED` is stored,
    and `warn` counts it."""

    redactors: Sequence[Redactor]
    keep_token_ids: bool = False
    warn: Callable[[str, str], None] = _warn_once_outside
    _redacted: BoundedCache[tuple[dict[str, Any], bool]] = field(
        default_factory=lambda: BoundedCache(_MESSAGES, _MESSAGE_BYTES)
    )

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message to store. The given message is not changed."""
        return self._redact_message(message)[0]

    def changes(self, message: Mapping[str, Any]) -> bool:
        """Whether a message is stored in another form."""
        return self._redact_message(message)[1]

    def content(self, role: str, content: Any) -> Any:
        """A value to store that is not a message. Redactors see it as the content of a message with this role."""
        return self.message(self._as_message(role, content)).get("content")

    def task(self, task: Task) -> Task:
        """The task to store. If a task is a text, the text may be its id too; an id is never empty."""
        stored = self.content("task", task.input)
        if isinstance(task.input, str) and task.id == task.input:
            return Task(id=str(stored or WITHHELD), input=stored)
        return Task(id=task.id, input=stored)

    def error(self, error: CotuneError) -> CotuneError:
        """An error of an episode with a redacted cause, so that it may be shown."""
        cause = self.text(error.cause) or ""
        if cause == error.cause:
            return error
        redacted = copy.copy(error)
        redacted.cause = cause
        redacted.args = (f"{cause} {error.remedy}".strip(),)
        return redacted

    def text(self, text: str | None, role: str = "error") -> str | None:
        """A text to store that is not a message, for example an error; None if redactors leave no content."""
        content = None if text is None else self.content(role, text)
        return None if content is None else str(content)

    def table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """The request parameters to store."""
        if not table or not self.changes(self._as_message("params", dict(table))):
            return dict(table)  # the original: JSON would turn its tuples into lists
        stored = self.content("params", dict(table))
        return stored if isinstance(stored, dict) else {"redacted": stored}

    def call(self, call: RedactedCall) -> RedactedCall:
        """Redact all parts of a call. Returns the parts that may be stored, and whether redactors have changed any."""
        # 1. The request. If redactors change its messages or tools, the token ids of its prompt are withheld too,
        #    because they spell the original.
        messages: list[dict[str, Any]] = []
        messages_changed = False
        for message in call.messages:
            stored_message, message_changed = self._redact_message(message)
            messages.append(stored_message)
            messages_changed = messages_changed or message_changed
        tools, tools_changed = self._redact_tools(call.tools)
        params = self.table(call.params)
        params_changed = params != call.params
        edited_request = None  # the request that was sent, if edits of the prompts have changed it
        if call.edited_request is not None:
            edited_request = self._redact_request(call.edited_request)
        edited_request_changed = edited_request != call.edited_request
        prompt_changed = messages_changed or tools_changed or edited_request_changed

        # 2. The answer. Its grammar was made from the tools and the parameters of the request that was sent.
        answer = None
        if call.answer is not None:
            grammar_source_changed = params_changed or tools_changed or edited_request_changed
            sent_messages = messages if edited_request is None else edited_request.messages
            answer = self._redact_answer(call.answer, grammar_source_changed, sent_messages)
        error = self.text(call.error)
        answer_changed = answer != call.answer or error != call.error

        changed = prompt_changed or params_changed or answer_changed
        if changed and answer is not None:  # the likeliest tokens (`shown`) may reveal a hidden text
            candidates = tuple(msgspec.structs.replace(candidate, shown=None) for candidate in answer.candidates)
            answer = msgspec.structs.replace(answer, candidates=candidates)
        return RedactedCall(
            messages=messages,
            tools=tools,
            params=params,
            attempts=[self.text(attempt) or "" for attempt in call.attempts],
            error=error,
            answer=answer,
            edited_request=edited_request,
            changed=changed,
            tokens_withheld=prompt_changed and not self.keep_token_ids,
        )

    def _redact_request(self, edited_request: Outgoing) -> Outgoing:
        """The request that was sent, after edits of its prompts, in the form that may be stored."""
        tools, _ = self._redact_tools(edited_request.tools)
        return Outgoing(
            messages=list(map(self.message, edited_request.messages)),
            tools=tools,
            params=self.table(edited_request.params),
        )

    def _redact_tools(self, tools: list[dict[str, Any]] | None) -> tuple[Any, bool]:
        """The tools of a request to store, and whether redactors have changed them. Redactors see the list as the
        content of a message."""
        if not tools:
            return None, False
        stored_message, changed = self._redact_message(self._as_message("tools", tools))
        return stored_message.get("content"), changed

    def _redact_answer(
        self, answer: Answer, grammar_source_changed: bool, messages: Sequence[dict[str, Any]]
    ) -> Answer:
        """The answer to store, for a prompt that is stored as `messages`.

        `grammar_source_changed` is whether redactors changed the tools or the parameters that give the grammar of the
        answer was made. Then the grammar is withheld, and the token ids too, because they cannot be trained on without
        it. With `keep_token_ids`, both are kept. Ids of images that are no longer in the stored messages are withheld.
        """
        candidates = tuple(self._redact_candidate(candidate) for candidate in answer.candidates)
        sampling = self.table(answer.sampling)
        if grammar := answer.sampling.get("grammar"):
            holds_hidden_text = grammar_source_changed or sampling.get("grammar") != grammar
            sampling["grammar"] = grammar
            if holds_hidden_text and not self.keep_token_ids:
                sampling["grammar"] = WITHHELD
                candidates = tuple(msgspec.structs.replace(c, token_ids=(), logprobs=()) for c in candidates)
        if images := answer.sampling.get("images"):
            stored_images: set[str] = set()
            for message in messages:
                stored_images.update(image.id for image in split_images(message)[1])
            sampling["images"] = [image if image in stored_images else WITHHELD for image in images]
        return msgspec.structs.replace(answer, candidates=candidates, sampling=sampling)

    def _redact_candidate(self, candidate: Candidate) -> Candidate:
        """A candidate with its text, tool calls and finish reason redacted.

        If redactors change it, its token ids and log-probabilities are removed, because the ids spell the hidden text.
        With `keep_token_ids`, they stay.
        """
        if candidate.finish_reason not in _FINISHED:
            finish = str(self.content("finish_reason", candidate.finish_reason))
            candidate = msgspec.structs.replace(candidate, finish_reason=finish)
        # Redactors may rely on `role` and `content`, which a candidate with only tool calls may lack.
        message: dict[str, Any] = {"role": "assistant", "content": None, **candidate.message}
        # The text usually equals the content of the message. Only another text is shown to the redactors separately.
        message_of_text = message
        if candidate.text != message["content"]:
            message_of_text = self._as_message("assistant", candidate.text)
        if not self.changes(message) and not self.changes(message_of_text):
            return candidate
        stored_text = self.message(message_of_text).get("content")
        if not isinstance(stored_text, str):  # a redactor may return any content
            stored_text = FAILED
        redacted = msgspec.structs.replace(candidate, message=self.message(message), text=stored_text)
        if self.keep_token_ids:
            return redacted
        return msgspec.structs.replace(redacted, token_ids=(), logprobs=())

    def _as_message(self, role: str, content: Any) -> dict[str, Any]:
        """A value that is not a message, in the form in which redactors see it."""
        return {"role": role, "content": content}

    def _redact_message(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The message to store, and whether it differs from `message`. Redactors see the message after a conversion to
        JSON and back. The result is remembered, because the messages of a long history come with every call."""
        try:
            raw = _json.encode(message)
        except Exception:  # noqa: BLE001
            return self._warn_of_failure(message, "it is no JSON"), True
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        result = self._redacted.get(digest)
        if result is None:
            stored = self._redact(raw)
            result = stored, stored != msgspec.json.decode(raw)
            self._redacted.put(digest, result, len(raw))
        return result

    def _redact(self, raw: bytes) -> dict[str, Any]:
        """Apply the redactors in order to a message, which is given in JSON. If one of them raises or does not return a
        message, `FAILED` replaces the whole content."""
        message = msgspec.json.decode(raw)
        try:
            redacted: Any = message
            for redactor in self.redactors:
                redacted = redactor(redacted)
                if not isinstance(redacted, Mapping):
                    raise TypeError("no message")
            # Through JSON, as the store would write it: the comparison with the original must not see tuples or
            # subclasses.
            stored: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(redacted))
            return stored
        except Exception as error:  # noqa: BLE001
            return self._warn_of_failure(message, f"the redactor raised {type(error).__name__}")

    def _warn_of_failure(self, message: Mapping[str, Any], why: str) -> dict[str, Any]:
        """Count a message that could not be redacted. Returns the message to store in its place."""
        role = str(message.get("role", "unknown"))
        self.warn("redaction_failed", f"A message of role {role!r} is stored as {FAILED}: {why}.")
        return {"role": role, "content": FAILED}
