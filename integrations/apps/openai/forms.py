"""The OpenAI SDK's two chat interfaces: how each is read as chat and answered. Everything else is no call."""

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
from cotune.integrations.apps.openai.splice import spliced
from cotune.prompts.chat_texts import Said, map_body
from cotune.recording.model_calls import reason_of
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer


class Stream(Protocol):
    """What the events of a stream add up to."""

    def take(self, event: Any) -> bool:
        """Add an event; whether it is the last. Raises ProviderFailed for an error event, or one of `BROKEN`."""
        ...

    def over(self, *, done: bool) -> bool:
        """Whether the answer is whole though no event was the last; `done`: the stream ended with [DONE]."""
        ...

    def holds_answer(self) -> bool:
        """Whether the last event holds the whole answer, whatever came before it."""
        ...

    def some(self) -> bool:
        """Whether it says anything."""
        ...

    def body(self, *, whole: bool) -> dict[str, Any]:
        """The body; where it is not `whole`, as far as it has come, marked as interrupted."""
        ...


@dataclass(frozen=True, kw_only=True)
class Form:
    """One interface: requests as chat, provider's bodies and streams as answers, and answers as its bodies.

    `asked` is always the request's own body.
    """

    name: str
    path: str
    read: Callable[[Mapping[str, Any], LiveEpisode], tuple[dict[str, Any], str]]
    """The request as chat, and what in it only a provider can serve, or "". Raises ValueError, TypeError or
    AttributeError when it cannot be read."""
    content: Callable[[LiveCall, Answer, Mapping[str, Any]], tuple[bytes, str]]
    """What answers a request: a body, or a stream where it asks for one, and the content type. The body is kept."""
    answer: Callable[[Any], Answer]
    """Raises ValueError for a malformed body, ProviderFailed for one that says there is no answer."""
    stream: Callable[[], Stream]
    rewrite: Callable[[Mapping[str, Any], Said], Mapping[str, Any]]
    """The request with its edited prompts; itself where nothing changes."""
    keep: Callable[[LiveCall, Mapping[str, Any], Mapping[str, Any]], None] | None = None
    """Remember a body for later requests that refer to it, where they can."""


TEXT_COMPLETIONS = "/completions"
TEXT_COMPLETION = (
    "unseen_call",
    "A legacy text completion (POST /completions) is not recorded, and no policy answers it: use chat completions.",
)
"""The warning of a request to the interface before chat: a continued text has no messages, so no turns to group."""


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


def edited(call: LiveCall, form: Form, asked: Mapping[str, Any], raw: bytes) -> bytes:
    """What goes out for a request: `raw`, the body that was asked, but for what the prompts of the call have edited."""
    if call.edits is None:
        return raw
    return spliced(raw, asked, form.rewrite(asked, call.edits.text))


BROKEN = (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError)
"""What reading a malformed body raises."""


def finish(call: LiveCall, form: Form, asked: Mapping[str, Any], raw: bytes, streamed: bool) -> bool:
    """End the call with the body `raw`, a stream or JSON, also where it is broken in itself or tells of a failure.

    False where the body is cut short: the call stays open.
    """
    found = None
    try:
        body = body_of_stream(form, raw) if streamed else decoded(raw)
        if body is None:
            return False
        found = form.answer(body)
        if form.keep is not None:
            form.keep(call, asked, body)
    except ProviderFailed as failure:
        call.fail("error", str(failure), part_of(form, raw, streamed))
    except BROKEN as broken:
        if isinstance(broken, msgspec.DecodeError) and "truncated" in str(broken):
            return False
        call.fail("malformed", reason_of(broken)[1], found or part_of(form, raw, streamed))
    else:
        call.finish(found)
    return True


def decoded(raw: bytes) -> Any:
    """JSON as the SDK takes it, which is more than JSON has: NaN, and halves of surrogate pairs."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        # msgspec also calls a text cut short that ends with half of a surrogate pair.
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(raw, parse_constant=lambda name: None)
        raise


def body_of_stream(form: Form, raw: bytes) -> dict[str, Any] | None:
    """The body that a stream adds up to; None when it was not read to its end.

    The last event of a Responses stream holds the whole answer. The client takes it from there, so faults of the events
    before it do not matter. In any other stream the first fault is raised at the end.
    """
    stream, done, ended = form.stream(), False, False
    fault: Exception | None = None
    for data in events(raw):
        if done := data.startswith(b"[DONE]"):
            break
        event = decoded(data)
        try:
            ended = stream.take(event)
        except BROKEN as broken:
            fault = fault or broken
        if ended:
            break
    if ended and stream.holds_answer():
        return stream.body(whole=True)
    if fault is not None:
        raise fault
    return stream.body(whole=True) if ended or stream.over(done=done) else None


def part_of(form: Form, raw: bytes, streamed: bool) -> Answer | None:
    """The answer as far as the sound events of a broken or half-read stream tell it; None for JSON, of which a part
    tells nothing."""
    if not streamed:
        return None
    stream = form.stream()
    for data in events(raw[: raw.rfind(b"\n") + 1]):
        with contextlib.suppress(ProviderFailed, *BROKEN):
            stream.take(decoded(data))
    with contextlib.suppress(ProviderFailed, *BROKEN):
        return form.answer(stream.body(whole=False)) if stream.some() else None
    return None
