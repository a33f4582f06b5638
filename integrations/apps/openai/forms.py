"""The two chat interfaces of the OpenAI SDK: Chat Completions and Responses. Requests to other paths are no calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from cotune.integrations.apps.openai import completions as chat_completions
from cotune.integrations.apps.openai import response_body as openai_response_body
from cotune.integrations.apps.openai import responses as openai_responses
from cotune.integrations.apps.openai.completions import events
from cotune.integrations.apps.openai.response_body import ProviderFailed
from cotune.integrations.apps.openai.splice import replace_values
from cotune.prompts.chat_texts import ReplaceText, map_body
from cotune.recording.model_calls import reason_of
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer


class Stream(Protocol):
    """Collects the events of a stream into the body of an answer."""

    def take(self, event: Any) -> bool:
        """Add an event. True if it is the last one.

        Raises ProviderFailed for an error event, or one of `BROKEN` for a malformed one.
        """
        ...

    def over(self, *, done: bool) -> bool:
        """Whether the answer is complete although no event was the last. `done`: the stream ended with [DONE]."""
        ...

    def holds_answer(self) -> bool:
        """Whether the last event holds the complete answer, independent of the events before it."""
        ...

    def has_parts(self) -> bool:
        """Whether the events hold any part of an answer."""
        ...

    def body(self, *, whole: bool) -> dict[str, Any]:
        """The body of the answer. If it is not `whole`, its status or finish reason is `interrupted`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Form:
    """One interface. It translates requests to chat, a provider's bodies and streams to answers, and answers to bodies.

    The Mapping in the functions is always the body of the request, as the application sent it.
    """

    name: str
    path: str
    read: Callable[[Mapping[str, Any], LiveEpisode], tuple[dict[str, Any], str]]
    """The request as chat, and a text that names its features that only a provider can serve (empty if none).

    Raises ValueError, TypeError or AttributeError for a request that cannot be read."""
    content: Callable[[LiveCall, Answer, Mapping[str, Any]], tuple[bytes, str]]
    """The response to a request, and its content type: a JSON body, or a stream if the request asks for one. The body
    is remembered for later requests."""
    answer: Callable[[Any], Answer]
    """The answer in a body. Raises ValueError for a malformed body, ProviderFailed for one that reports a failure."""
    stream: Callable[[], Stream]
    rewrite: Callable[[Mapping[str, Any], ReplaceText], Mapping[str, Any]]
    """The request with its edited prompts; the same object if nothing changes."""
    keep: Callable[[LiveCall, Mapping[str, Any], Mapping[str, Any]], None] | None = None
    """Remember a body for later requests that refer to it; None if the interface has no references."""


TEXT_COMPLETIONS = "/completions"
TEXT_COMPLETION = (
    "unseen_call",
    "A legacy text completion (POST /completions) is not recorded, and no policy answers it: use chat completions.",
)
"""The warning for a request to the interface before chat. A continued text has no messages, so no turns to group."""


CHAT = Form(
    name="chat",
    path="/chat/completions",
    read=chat_completions.read,
    content=chat_completions.content_of,
    answer=chat_completions.answer_of,
    stream=chat_completions.ChatStream,
    rewrite=map_body,
)
RESPONSES = Form(
    name="responses",
    path="/responses",
    read=openai_responses.read,
    content=openai_response_body.content_of,
    answer=openai_response_body.answer_of,
    stream=openai_response_body.ResponseStream,
    rewrite=openai_responses.rewrite,
    keep=openai_responses.keep,
)
FORMS = (CHAT, RESPONSES)


def edited_body(call: LiveCall, form: Form, request_body: Mapping[str, Any], raw: bytes) -> bytes:
    """The body to send: `raw`, the JSON of `request_body`, with the edited prompts of the call."""
    if call.edits is None:
        return raw
    return replace_values(raw, request_body, form.rewrite(request_body, call.edits.text))


BROKEN = (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError)
"""Errors that reading a malformed body may raise."""


def end_with_body(call: LiveCall, form: Form, request_body: Mapping[str, Any], raw: bytes, streamed: bool) -> bool:
    """End the call with the body `raw`, a stream or JSON. A malformed body, and one that reports a failure, make the
    call fail.

    Returns False if the body is cut short: the call stays open.
    """
    answer = None
    try:
        body = body_of_stream(form, raw) if streamed else decode_json(raw)
        if body is None:
            return False
        answer = form.answer(body)
        if form.keep is not None:
            # Later requests may refer to this answer by its id.
            form.keep(call, request_body, body)
    except ProviderFailed as failure:
        call.fail("error", str(failure), part_of(form, raw, streamed))
    except BROKEN as broken:
        if isinstance(broken, msgspec.DecodeError) and "truncated" in str(broken):
            return False
        if answer is None:
            answer = part_of(form, raw, streamed)
        _, reason = reason_of(broken)
        call.fail("malformed", reason, answer)
    else:
        call.finish(answer)
    return True


def decode_json(raw: bytes) -> Any:
    """Decode JSON as leniently as the SDK, which also accepts NaN and halves of surrogate pairs."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        # msgspec reports a text that ends with half of a surrogate pair as truncated.
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(raw, parse_constant=lambda name: None)
        raise


def body_of_stream(form: Form, raw: bytes) -> dict[str, Any] | None:
    """The body of a stream's answer; None if the stream was not read to its end.

    The last event of a Responses stream holds the complete answer. The client takes it from there, so faults in earlier
    events do not matter. For any other stream the first fault is raised, after all events.
    """
    stream = form.stream()
    has_done_mark = False
    has_last_event = False
    first_fault: Exception | None = None
    for data in events(raw):
        if data.startswith(b"[DONE]"):
            has_done_mark = True
            break
        event = decode_json(data)
        try:
            has_last_event = stream.take(event)
        except BROKEN as broken:
            first_fault = first_fault or broken
        if has_last_event:
            break
    if has_last_event and stream.holds_answer():
        return stream.body(whole=True)
    if first_fault is not None:
        raise first_fault
    if has_last_event or stream.over(done=has_done_mark):
        return stream.body(whole=True)
    return None


def part_of(form: Form, raw: bytes, streamed: bool) -> Answer | None:
    """The partial answer in the well-formed events of a broken or half-read stream; None for a JSON body."""
    if not streamed:
        return None
    stream = form.stream()
    complete_lines = raw[: raw.rfind(b"\n") + 1]
    for data in events(complete_lines):
        with contextlib.suppress(ProviderFailed, *BROKEN):
            stream.take(decode_json(data))
    with contextlib.suppress(ProviderFailed, *BROKEN):
        if stream.has_parts():
            return form.answer(stream.body(whole=False))
    return None
