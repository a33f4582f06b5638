"""The OpenAI SDK's two chat interfaces: how each is read as chat and answered. Everything else is no call."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cotune.integrations.apps.openai import completions as chat_completions
from cotune.integrations.apps.openai import response_body as openai_response_body
from cotune.integrations.apps.openai import responses as openai_responses
from cotune.integrations.apps.openai.response_body import ProviderFailed
from cotune.recording.model_calls import reason_of
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer


@dataclass(frozen=True, kw_only=True)
class Form:
    """One interface: requests as chat, provider's bodies and streams as answers, and answers as its bodies.

    `asked` is always the request's own body.
    """

    name: str
    path: str
    chat: Callable[[Mapping[str, Any], LiveEpisode], dict[str, Any]]
    """The request as chat. Raises ValueError, TypeError or AttributeError when it cannot be read."""
    unsupported_reason: Callable[[Mapping[str, Any], Mapping[str, Any], LiveEpisode], str]
    """What in a request, given also as chat, only a provider can serve, or ""."""
    body: Callable[[LiveCall, Answer, Mapping[str, Any]], dict[str, Any]]
    events: Callable[[Mapping[str, Any], Mapping[str, Any]], bytes]
    """A body as a stream."""
    answer: Callable[[Any], Answer]
    """Raises ValueError for a malformed body, ProviderFailed for one that says there is no answer."""
    stream: Callable[[bytes], dict[str, Any] | None]
    """The body that a stream adds up to; None when it was not read to its end."""
    part: Callable[[bytes], dict[str, Any] | None]
    """The body as far as a broken or half-read stream tells it."""
    keep: Callable[[LiveCall, Mapping[str, Any], Mapping[str, Any]], None]
    """Remember a body for later requests that refer to it."""


TEXT_COMPLETIONS = "/completions"
TEXT_COMPLETION = (
    "unseen_call",
    "A legacy text completion (POST /completions) is not recorded, and no policy answers it: use chat completions.",
)
"""The warning of a request to the interface before chat: a continued text has no messages, so no turns to group."""


def form_of(request: Any) -> Form | None:
    """The interface that an httpx or httpx2 request belongs to, under whatever prefix; None where it is no call."""
    if request.method != "POST":
        return None
    path = request.url.path
    for form in FORMS:
        if path.endswith(form.path):
            return form
    return None


def _chat_unsupported(asked: Mapping[str, Any], chat: Mapping[str, Any], episode: LiveEpisode) -> str:
    found = []
    if tools := chat.get("tools"):
        kinds = [str(tool.get("type")) for tool in tools if tool.get("type", "function") != "function"]
        found = [f"tools of type {', '.join(dict.fromkeys(kinds))}"] if kinds else []
    if "audio" in (asked.get("modalities") or ()):
        found.append("spoken output")
    if asked.get("web_search_options"):
        found.append("web search")
    if asked.get("functions"):
        found.append("functions in their old form (use tools)")
    return " and ".join(found)


CHAT = Form(
    name="chat",
    path="/chat/completions",
    chat=lambda asked, episode: dict(asked),
    unsupported_reason=_chat_unsupported,
    body=lambda call, answer, asked: chat_completions.completion_of(call, answer),
    events=lambda body, asked: chat_completions.to_stream(
        body, usage=bool((asked.get("stream_options") or {}).get("include_usage"))
    ),
    answer=chat_completions.answer_of,
    stream=chat_completions.from_stream,
    part=chat_completions.part_of_stream,
    keep=lambda call, asked, body: None,
)
RESPONSES = Form(
    name="responses",
    path="/responses",
    chat=openai_responses.chat_of,
    unsupported_reason=openai_responses.unsupported_reason,
    body=openai_response_body.response_of,
    events=lambda body, asked: openai_response_body.to_events(body),
    answer=openai_response_body.answer_of,
    stream=openai_response_body.from_events,
    part=openai_response_body.part_of_events,
    keep=lambda call, asked, body: openai_responses.earlier_in(call.episode).keep(call, asked, body),
)
FORMS = (CHAT, RESPONSES)


def asked_in(request: Any) -> dict[str, Any]:
    """The body of a request. Raises ValueError when it is no JSON object."""
    asked = msgspec.json.decode(request.content)
    if not isinstance(asked, dict):
        raise ValueError("the body is no JSON object")
    return asked


def encoded(call: LiveCall, form: Form, asked: Mapping[str, Any], answer: Answer) -> tuple[bytes, str]:
    """What answers a request: its content, a stream where it asks for one, and the content type."""
    body = form.body(call, answer, asked)
    form.keep(call, asked, body)
    if call.streamed:
        return form.events(body, asked), "text/event-stream; charset=utf-8"
    return msgspec.json.encode(body), "application/json"


BROKEN = (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError)
"""What reading a malformed body raises."""


def finish(call: LiveCall, form: Form, asked: Mapping[str, Any], raw: bytes, streamed: bool) -> bool:
    """End the call with the body `raw`, a stream or JSON, also where it is broken in itself or tells of a failure.

    False, and the call goes on, where the body is cut short.
    """
    found = None
    try:
        body = form.stream(raw) if streamed else _decoded(raw)
        if body is None:
            return False
        found = form.answer(body)
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


def _decoded(raw: bytes) -> Any:
    """JSON as the SDK takes it, which is more than JSON has: NaN, and surrogates that stand alone."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as broken:
        if "truncated" not in str(broken):
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(raw, parse_constant=lambda name: None)
        raise


def part_of(form: Form, raw: bytes, streamed: bool) -> Answer | None:
    """The answer as far as a broken or half-read stream tells it; None for JSON, of which a part tells nothing."""
    if not streamed:
        return None
    try:
        body = form.part(raw)
        return None if body is None else form.answer(body)
    except (ProviderFailed, *BROKEN):
        return None
