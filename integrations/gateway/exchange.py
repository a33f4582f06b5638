"""One call through the gateway: a copy of its answer becomes records."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from cotune.integrations.gateway.requests import inflate
from cotune.integrations.openai.answers import finish, part_of
from cotune.integrations.openai.forms import Form
from cotune.recording.answers import Answer
from cotune.recording.model_calls import reason_of
from cotune.recording.recorder import LiveCall
from cotune.recording.records import CallStatus

MAX_COPY = 64 << 20
"""Most bytes of an answer that are kept for the record."""
_UNCODED = (KeyError, OverflowError)
"""What `inflate` raises besides zlib.error: for a coding it does not know, and for too many bytes."""


class Exchange:
    """A call in flight. All on the gateway's event loop."""

    def __init__(self, call: LiveCall, form: Form, asked: Mapping[str, Any], ended: Callable[[Exchange], None]) -> None:
        self.call = call
        self.form = form
        self.asked = asked
        self._ended = ended
        self._chunks: list[bytes] = []
        self.size = 0
        self._kind = self._coding = ""
        self.answering = False
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

    def fail(self, status: CallStatus, text: str) -> None:
        """End the call as failed."""
        self.call.fail(status, text)
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
        except zlib.error:
            return False
        except _UNCODED as broken:
            self.call.fail("malformed", reason_of(broken)[1])
            return True
        return finish(self.call, self.form, self.asked, raw, self._streamed)

    @property
    def _streamed(self) -> bool:
        return self.call.streamed and "text/event-stream" in self._kind

    def _part(self) -> Answer | None:
        try:
            return part_of(self.form, self._raw(whole=False), self._streamed)
        except (zlib.error, *_UNCODED):
            return None

    def _raw(self, whole: bool) -> bytes:
        raw = b"".join(self._chunks)
        coding = self._coding.strip().lower()
        return raw if coding in ("", "identity") else inflate(raw, coding, MAX_COPY, whole)
