"""One call through the gateway: the parsed request, and a copy of the answer for the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from cotune.integrations.apps.openai.forms import Form, edited, finish, part_of
from cotune.integrations.web.http.bodies import aside, decoded, inflated, json_values
from cotune.integrations.web.http.limits import MOST_MESSAGES, Limits
from cotune.integrations.web.http.requests import RequestError, invalid_value
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import CallStatus
from cotune.sampling.request_params import asks_logprobs

T = TypeVar("T")
_TOKEN, _SHOWN = 8, 10
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
    """A call in flight. Methods run on the gateway's event loop; slow work on large calls runs in threads (`aside`)."""

    call: LiveCall
    form: Form
    asked: Mapping[str, Any]
    asked_bytes: int
    limits: Limits
    _ended: Callable[[Exchange], None]
    _chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    _kind: str = ""
    _coding: str = ""
    answering: bool = False
    """Whether an answer has begun that is no error."""
    refusal: str = ""
    """The provider's error; empty if it did not answer with one."""
    _outage: bool = True

    async def outgoing(self, raw: bytes, coding: str) -> bytes:
        """The body to send for `raw`, with the edits of the call's prompts and without a content coding."""

        def plain() -> bytes:
            body = inflated(raw, coding, self.limits.max_body, "--max-body")
            return edited(self.call, self.form, self.asked, body)

        return await aside(self.asked_bytes, plain)

    def begins(self, kind: str, coding: str) -> None:
        """Note that an answer begins that is no error, with its content type and content coding."""
        self._kind, self._coding = kind, coding
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
        self.refusal, self._outage = cause, outage

    def over(self) -> None:
        """Note that the call has been ended elsewhere."""
        self._ended(self)

    async def fail(self, status: CallStatus, text: str, *, outage: bool = True) -> None:
        """End the call as failed."""
        await self._aside(lambda: self.call.fail(status, text, outage=outage))

    async def answered(self, answer: Answer) -> tuple[bytes, str]:
        """End the call with a policy's answer. Returns the body and the content type of the response."""
        shown = 1 + int(self.call.params.get("top_logprobs") or 0) if asks_logprobs(self.asked) else 0
        tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens * (1 + _SHOWN * shown)

        def encode_and_record() -> tuple[bytes, str]:
            content = self.form.content(self.call, answer, self.asked)
            self.call.finish(answer)
            return content

        return await self._aside(encode_and_record, _TOKEN * tokens)

    async def settle(self, status: CallStatus, text: str) -> None:
        """End the call with its answer. A call with an incomplete answer fails with `status` and the cause `text`."""
        await self._aside(lambda: self._settle(status, text))

    def settle_now(self, status: CallStatus, text: str) -> None:
        """Like `settle`, but without a thread, however long it takes."""
        self._settle(status, text)
        self._ended(self)

    async def whole(self) -> None:
        """End the call if its answer is complete."""
        await self._aside(self.finish)

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
            raw = self._raw(whole=not self._streamed)
        except RequestError as broken:
            if broken.status != 400:
                self.call.fail("malformed", broken.message)
            return broken.status != 400
        # A body with very many JSON values takes far more memory than its bytes. The events of a stream are parsed one
        # by one, and so do not.
        if not self._streamed and (values := json_values(raw, self.limits.max_values)) > self.limits.max_values:
            text = f"the answer holds {values} JSON values; at most {self.limits.max_values} are read"
            self.call.fail("malformed", text)
            return True
        return finish(self.call, self.form, self.asked, raw, self._streamed)

    def _settle(self, status: CallStatus, text: str) -> None:
        if not self.finish():
            self.call.fail(status, text, self._part())

    async def _aside(self, work: Callable[[], T], answer_bytes: int = 0) -> T:
        """Do work that may end the call, in a thread if the call is large."""
        result = await aside(self.asked_bytes + self.size + answer_bytes, work)
        if self.call.ended:
            self._ended(self)
        return result

    @property
    def _streamed(self) -> bool:
        return self.call.streamed and "text/event-stream" in self._kind

    def _part(self) -> Answer | None:
        if self.size > self.limits.max_answer:
            return None
        try:
            return part_of(self.form, self._raw(whole=False), self._streamed)
        except RequestError:
            return None

    def _raw(self, whole: bool) -> bytes:
        return inflated(b"".join(self._chunks), self._coding, self.limits.max_answer, "", whole)
