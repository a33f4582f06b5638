"""One call through the gateway: its request as far as the record needs it, and a copy of its answer for the record."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from cotune.integrations.http.requests import RequestError, decode_body, invalid_value
from cotune.integrations.openai.forms import Form, finish, part_of
from cotune.recording.answers import Answer
from cotune.recording.recorder import LiveCall
from cotune.recording.records import CallStatus

MAX_COPY = 64 << 20
"""Most bytes of an answer that are kept for the record."""
_Objects = Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


class _Request(msgspec.Struct, kw_only=True):
    """What must be well-formed in any call, so that it can be recorded."""

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


def read_call(form: Form, raw: bytes) -> dict[str, Any]:
    """The body of a call. Raises RequestError (400) that names the field which cannot be recorded."""
    body = decode_body(raw, dict[str, Any])
    try:
        msgspec.convert(body, _Response if form.name == "responses" else _Messages)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None
    return body


def inflated(raw: bytes, coding: str, limit: int, whole: bool = True) -> bytes:
    """A body without its content coding.

    Raises RequestError for one that is broken (400; also for one that is cut off, if it has to be `whole`), unknown
    (415) or of more than `limit` bytes (413).
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return raw
    if coding != "gzip":
        message = f"The body's Content-Encoding {coding[:40]!r} cannot be read; gzip can."
        raise RequestError(415, message, code="unsupported_encoding")
    found = zlib.decompressobj(31)
    try:
        text = found.decompress(raw, limit + 1)
        if len(text) <= limit and whole and not found.eof:
            raise zlib.error("it ends early")
    except zlib.error as error:
        raise RequestError(400, f"The body is not gzip: {error}.", code="invalid_encoding") from None
    if len(text) > limit:
        raise RequestError(413, f"The body is larger than {limit} bytes.", code="body_too_large")
    return text


@dataclass(eq=False)
class Exchange:
    """A call in flight. All on the gateway's event loop."""

    call: LiveCall
    form: Form
    asked: Mapping[str, Any]
    _ended: Callable[[Exchange], None]
    _chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    _kind: str = ""
    _coding: str = ""
    answering: bool = False
    """Whether an answer that is no error is on its way."""

    def begins(self, kind: str, coding: str) -> None:
        """An answer that is no error begins: its content type and content coding."""
        self._kind, self._coding = kind, coding
        self.answering = True

    def add(self, chunk: bytes) -> None:
        """Keep a copy of what passes."""
        self.size += len(chunk)
        if self.size <= MAX_COPY:
            self._chunks.append(chunk)

    def over(self) -> None:
        """The call has ended otherwise."""
        self._ended(self)

    def fail(self, status: CallStatus, text: str, *, outage: bool = True) -> None:
        """End the call as failed."""
        self.call.fail(status, text, outage=outage)
        self._ended(self)

    def settle(self, status: CallStatus, text: str) -> None:
        """End the call with the answer as it came; where that is not a whole one, as `status` for the reason `text`."""
        if not self.call.ended and not self.finish():
            self.call.fail(status, text, self._part())
        self._ended(self)

    def finish(self) -> bool:
        """End the call if what has passed is a whole answer, also if it is broken in itself."""
        if not self.answering:
            return False
        if self.size > MAX_COPY:
            self.call.fail("malformed", f"the answer has more than the {MAX_COPY} bytes that are kept for the record")
            return True
        try:
            raw = self._raw(whole=not self._streamed)
        except RequestError as broken:
            if broken.status != 400:
                self.call.fail("malformed", broken.message)
            return broken.status != 400
        return finish(self.call, self.form, self.asked, raw, self._streamed)

    @property
    def _streamed(self) -> bool:
        return self.call.streamed and "text/event-stream" in self._kind

    def _part(self) -> Answer | None:
        try:
            return part_of(self.form, self._raw(whole=False), self._streamed)
        except RequestError:
            return None

    def _raw(self, whole: bool) -> bytes:
        return inflated(b"".join(self._chunks), self._coding, MAX_COPY, whole)
