"""Bodies of gateway requests: read as far as the record needs, refused with a named cause where they cannot be."""

from __future__ import annotations

import zlib
from typing import Any

from cotune.integrations.http.requests import RequestError, decode_body
from cotune.integrations.openai.forms import Form
from cotune.recording.recorder import LiveEpisode


def read_call(form: Form, raw: bytes) -> dict[str, Any]:
    """The body of a call. Raises RequestError (400) that names the field which cannot be recorded."""
    body = decode_body(raw, dict[str, Any])
    _need(body, "model", str, "a text")
    _need(body, "stream", bool, "true or false")
    _need(body, "n", int, "a whole number")
    _need(body, "tools", list, "a list of objects")
    if not all(isinstance(tool, dict) for tool in body.get("tools") or ()):
        raise _wrong("tools", "a list of objects")
    if form.name in ("chat", "messages"):
        _need(body, "system", (str, list), "a text or a list of blocks")
        _need_messages("messages", body.get("messages"))
    else:
        _need(body, "input", (str, list), "a text or a list of objects")
        _need(body, "instructions", (str, list), "a text")
        if isinstance(body.get("input"), list):
            _need_messages("input", body["input"])
    return body


def chat_of(form: Form, asked: dict[str, Any], episode: LiveEpisode) -> tuple[dict[str, Any], str]:
    """A body as chat, and what in it no policy can serve. Raises RequestError (400) where it cannot be read."""
    try:
        chat = form.chat(asked, episode)
        return chat, form.unsupported_reason(asked, chat, episode)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise RequestError(400, f"The request cannot be read: {error}.", code="invalid_value") from None


def inflated(raw: bytes, coding: str, limit: int) -> bytes:
    """A body without its content coding. Raises RequestError for one that is broken (400), unknown (415) or more than
    `limit` bytes (413)."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return raw
    try:
        return inflate(raw, coding, limit)
    except KeyError:
        message = f"The body's Content-Encoding {coding[:40]!r} cannot be read; gzip and deflate can."
        raise RequestError(415, message, code="unsupported_encoding") from None
    except OverflowError:
        raise RequestError(413, f"The body is larger than {limit} bytes.", code="body_too_large") from None
    except zlib.error as error:
        raise RequestError(400, f"The body is not {coding}: {error}.", code="invalid_encoding") from None


def inflate(raw: bytes, coding: str, limit: int, whole: bool = True) -> bytes:
    """Raises KeyError for an unknown coding, zlib.error for broken data (or, if `whole`, cut off), OverflowError beyond
    `limit`."""
    bits = {"gzip": 31, "x-gzip": 31, "deflate": 15}[coding]
    found = zlib.decompressobj(bits)
    try:
        text = found.decompress(raw, limit + 1)
    except zlib.error:
        if coding != "deflate":
            raise
        found = zlib.decompressobj(-15)
        text = found.decompress(raw, limit + 1)
    if len(text) > limit:
        raise OverflowError
    if whole and not found.eof:
        raise zlib.error("it ends early")
    return text


def _need(body: dict[str, Any], name: str, kind: type | tuple[type, ...], allowed: str) -> None:
    value = body.get(name)
    if value is None:
        return
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(name, allowed)


def _need_messages(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise _wrong(name, "a non-empty list of objects")


def _wrong(name: str, allowed: str) -> RequestError:
    return RequestError(400, f"{name}: expected {allowed}.", param=name, code="invalid_value")
