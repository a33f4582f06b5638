"""Redaction: functions of the user's that see each message before it is stored, and what is stored instead."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from cotune.errors import ConfigError, WorkflowError
from cotune.ids import message_id
from cotune.records import Candidate, Task

if TYPE_CHECKING:
    from cotune.recorder import Answer, LiveCall

Redactor = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A message in, the message to store out. What is no chat message comes as one too: see `docs/privacy.md`."""

FAILED = "[redaction failed]"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What may be stored of a call. `changed`: anything differs; `withheld`: so does what its prompt is made of."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    error: str | None = None
    answer: Answer | None = None
    changed: bool = True
    withheld: bool = True


def check_redactor(fn: Any) -> Redactor:
    """`fn` itself. Raises WorkflowError unless it is a plain function of one argument."""
    name = getattr(fn, "__name__", repr(fn))
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        raise WorkflowError(f"The redactor {name} is not a plain function.", "Define it as: def redact(message): ...")
    try:
        inspect.signature(fn).bind({})
    except TypeError:
        remedy = "Define it as: def redact(message): ... and return the message to store."
        raise WorkflowError(f"The redactor {name} does not take one argument.", remedy) from None
    except ValueError:
        return fn  # type: ignore[no-any-return]
    return fn  # type: ignore[no-any-return]


def load_redactor(spec: str) -> Redactor:
    """Import `module:function`. Raises ConfigError for what is not there, WorkflowError for what is no redactor."""
    source, _, name = spec.rpartition(":")
    try:
        return check_redactor(getattr(importlib.import_module(source), name))
    except (ImportError, AttributeError, ValueError) as error:
        allowed = f"module:function of a redactor ({type(error).__name__}: {error})"
        raise ConfigError("redact", spec, allowed, "For example: --redact privacy:hide") from None


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


@dataclass
class Redaction:
    """The redactors of one episode, applied in order, each message once. A redactor that raises stores `FAILED`."""

    redactors: Sequence[Redactor]
    keep_token_ids: bool = False
    warn: Callable[[str, str], None] = lambda kind, text: None
    _done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What to store of a message; the message itself is not touched."""
        try:
            name = message_id(message)
        except Exception:  # noqa: BLE001
            return self._failed(message, "it is no JSON")
        if name not in self._done:
            self._done[name] = self._redact(message)
        return self._done[name]

    def content(self, role: str, content: Any) -> Any:
        """The same for something that is no message: it is shown as the content of one of this role."""
        return self.message({"role": role, "content": content}).get("content")

    def task(self, task: Task) -> Task:
        return Task(id=task.id, input=self.content("task", task.input))

    def text(self, text: str | None) -> str | None:
        """The same for an error text."""
        return None if text is None else str(self.content("error", text))

    def table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """The same for request parameters."""
        found = self.content("params", dict(table)) if table else {}
        return found if isinstance(found, dict) else {"redacted": found}

    def told(self, call: LiveCall, answer: Answer | None, error: str | None) -> Told:
        """What may be stored of a call that has ended."""
        messages = [self.message(message) for message in call.messages]
        tools = self.content("tools", call.tools) if call.tools else None
        params = self.table(call.params)
        answered = None if answer is None else self._answer(answer)
        withheld = messages != call.messages or tools != call.tools
        told = Told(
            messages=messages,
            tools=tools,
            params=params,
            attempts=[str(self.text(attempt)) for attempt in call.attempts],
            error=self.text(error),
            answer=answered,
            changed=withheld or answered != answer or params != call.params or self.text(error) != error,
            withheld=withheld and not self.keep_token_ids,
        )
        return told

    def _answer(self, answer: Answer) -> Answer:
        candidates = tuple(self._candidate(candidate) for candidate in answer.candidates)
        return msgspec.structs.replace(answer, candidates=candidates, sampling=self.table(answer.sampling))

    def _candidate(self, candidate: Candidate) -> Candidate:
        message = self.message({"role": "assistant", **candidate.message})
        if candidate.text == candidate.message.get("content"):
            text = message.get("content")
        else:
            text = self.content("assistant", candidate.text) if candidate.text else ""
        text = text if isinstance(text, str) else FAILED
        if text == candidate.text and message == {"role": "assistant", **candidate.message}:
            return candidate
        changed = msgspec.structs.replace(candidate, text=text, message=message)
        return changed if self.keep_token_ids else msgspec.structs.replace(changed, token_ids=(), logprobs=())

    def _redact(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            found: Any = copy.deepcopy(dict(message))
            for redactor in self.redactors:
                found = dict(redactor(found))
            msgspec.json.encode(found)
            return found  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001
            return self._failed(message, f"the redactor raised {type(error).__name__}")

    def _failed(self, message: Mapping[str, Any], why: str) -> dict[str, Any]:
        role = str(message.get("role", "unknown"))
        self.warn("redaction_failed", f"A message of role {role!r} is stored as {FAILED}: {why}.")
        return {"role": role, "content": FAILED}
