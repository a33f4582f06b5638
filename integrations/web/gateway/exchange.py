"""One call through the gateway: the parsed request, and a copy of the answer for the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from cotune.integrations.apps.openai.forms import Form, edited_body, end_with_body, part_of
from cotune.integrations.web.http.bodies import decoded, in_thread_if_large, inflated, json_values
from cotune.integrations.web.http.limits import MOST_MESSAGES, Limits
from cotune.integrations.web.http.requests import RequestError, invalid_value
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import CallStatus
from cotune.sampling.request_params import asks_logprobs

T = TypeVar("T")
_BYTES_PER_TOKEN = 8
_LOGPROB_FACTOR = 10
"""Approximate bytes of an answer per token, and the factor for a token that is shown with its log-probability."""
_Objects = Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]


class _Request(msgspec.Struct, kw_only=True):
    """Fields that must be well-formed in any call, so that it can be recorded."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    tools: list[dict[str, Any]] | None = None


class _Messages(_Request, kw_only=True):
    messages: _Objects
    system: str | list[Any] | None = None


class _Response(_Request, kw_only=True):
    input: str | _Objects | None = None
    instructions: str | list[Any] | None = None


def read_call(form: Form, raw: bytes, coding: str, limits: Limits) -> dict[str, Any]:
    """The parsed body of a call.

    Raises RequestError (400, 413, 415), with the field or the limit, for a body that cannot be recorded.
    """
    body = decoded(inflated(raw, coding, limits.max_body, "--max-body"), dict[str, Any], limits.max_values)
    try:
        msgspec.convert(body, _Response if form.name == "responses" else _Messages)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None
    return body


@dataclass(eq=False)
class Exchange:
    """A call in flight. Methods run on the gateway's event loop; slow work on large calls runs in threads."""

    call: LiveCall
    form: Form
    body: Mapping[str, Any]
    body_bytes: int
    limits: Limits
    _on_end: Callable[[Exchange], None]
    """Called once the call has ended."""
    _chunks: list[bytes] = field(default_factory=list)
    """The answer so far; empty if it is longer than the limit for records."""
    size: int = 0
    """Bytes of the answer that have arrived."""
    _kind: str = ""
    """Content type of the answer."""
    _coding: str = ""
    """Content coding of the answer."""
    answering: bool = False
    """Whether an answer has begun that is no error."""
    refusal: str = ""
    """The provider's error; empty if it did not answer with one."""
    _outage: bool = True

    async def outgoing(self, raw: bytes, coding: str) -> bytes:
        """The body to send for `raw`, with the edits of the call's prompts and without a content coding."""

        def edited() -> bytes:
            raw_body = inflated(raw, coding, self.limits.max_body, "--max-body")
            return edited_body(self.call, self.form, self.body, raw_body)

        return await in_thread_if_large(self.body_bytes, edited)

    def begins(self, kind: str, coding: str) -> None:
        """Note that an answer begins that is no error, with its content type and content coding."""
        self._kind = kind
        self._coding = coding
        self.answering = True

    def add(self, chunk: bytes) -> None:
        """Keep a copy of a chunk of the answer, up to the limit for records."""
        self.size += len(chunk)
        if self.size <= self.limits.max_answer:
            self._chunks.append(chunk)
        else:
            self._chunks.clear()

    def refuse(self, cause: str, *, outage: bool) -> None:
        """Note that the provider answers with an error, which ends the call. The client gets it unchanged."""
        self.refusal = cause
        self._outage = outage

    def over(self) -> None:
        """Note that the call has been ended elsewhere."""
        self._on_end(self)

    async def fail(self, status: CallStatus, text: str, *, outage: bool = True) -> None:
        """End the call as failed."""
        await self._in_thread_if_large(lambda: self.call.fail(status, text, outage=outage))

    async def answered(self, answer: Answer) -> tuple[bytes, str]:
        """End the call with a policy's answer. Returns the body and the content type of the response."""
        # The body has log-probabilities of each token and of its `top_logprobs` most probable alternatives.
        n_logprobs = 0
        if asks_logprobs(self.body):
            n_logprobs = 1 + int(self.call.params.get("top_logprobs") or 0)
        units_per_token = 1 + _LOGPROB_FACTOR * n_logprobs
        # A large body is encoded in a thread. Its size is estimated, because it does not exist yet.
        units = answer.usage.prompt_tokens + answer.usage.completion_tokens * units_per_token

        def encode_and_record() -> tuple[bytes, str]:
            content = self.form.content(self.call, answer, self.body)
            self.call.finish(answer)
            return content

        return await self._in_thread_if_large(encode_and_record, _BYTES_PER_TOKEN * units)

    async def settle(self, status: CallStatus, text: str) -> None:
        """End the call with its answer. A call with an incomplete answer fails with `status` and the cause `text`."""
        await self._in_thread_if_large(lambda: self._end_with_answer(status, text))

    def settle_now(self, status: CallStatus, text: str) -> None:
        """Like `settle`, but without a thread, however long it takes."""
        self._end_with_answer(status, text)
        self._on_end(self)

    async def end_if_complete(self) -> None:
        """End the call if its answer is complete."""
        await self._in_thread_if_large(self.finish)

    def finish(self) -> bool:
        """End the call if its answer is complete, even if it is malformed. Returns whether the call has ended."""
        if self.call.ended:
            return True
        if self.refusal:
            self.call.fail("error", self.refusal, outage=self._outage)
            return True
        if not self.answering:
            return False
        if self.size > self.limits.max_answer:
            text = f"the answer has more than {self.limits.max_answer} bytes, the most that is recorded"
            self.call.fail("malformed", text)
            return True
        try:
            raw = self._answer_bytes(whole=not self._streamed)
        except RequestError as error:
            # 400 is a compressed answer that is cut off or broken, which counts as incomplete.
            if error.status == 400:
                return False
            self.call.fail("malformed", error.message)
            return True
        # A body with very many JSON values takes far more memory than its bytes. The events of a stream are parsed one
        # by one, and so do not.
        if not self._streamed and (values := json_values(raw, self.limits.max_values)) > self.limits.max_values:
            text = f"the answer holds {values} JSON values; at most {self.limits.max_values} are read"
            self.call.fail("malformed", text)
            return True
        return end_with_body(self.call, self.form, self.body, raw, self._streamed)

    def _end_with_answer(self, status: CallStatus, text: str) -> None:
        """End the call with its answer. With an incomplete answer it fails with `status` and the cause `text`."""
        if not self.finish():
            self.call.fail(status, text, self._partial_answer())

    async def _in_thread_if_large(self, work: Callable[[], T], answer_bytes: int = 0) -> T:
        """Do work that may end the call, in a thread if the call is large."""
        result = await in_thread_if_large(self.body_bytes + self.size + answer_bytes, work)
        if self.call.ended:
            self._on_end(self)
        return result

    @property
    def _streamed(self) -> bool:
        return self.call.streamed and "text/event-stream" in self._kind

    def _partial_answer(self) -> Answer | None:
        """The part of the answer that has arrived; None if it is too large or cannot be decoded."""
        if self.size > self.limits.max_answer:
            return None
        try:
            return part_of(self.form, self._answer_bytes(whole=False), self._streamed)
        except RequestError:
            return None  # the call fails anyway, and is recorded without an answer

    def _answer_bytes(self, whole: bool) -> bytes:
        return inflated(b"".join(self._chunks), self._coding, self.limits.max_answer, "", whole)
