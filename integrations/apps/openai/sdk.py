"""The hook in the OpenAI SDK: every request of a client passes `_send_request`, and is recorded or answered there.

Works with openai 2.45 and later and with 3.x. Outside an episode each hook costs one read of a ContextVar.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import msgspec

from cotune.errors import RecordError, SamplerError, error_text
from cotune.integrations.apps.openai.forms import (
    TEXT_COMPLETION,
    TEXT_COMPLETIONS,
    Form,
    asked_in,
    encoded,
    finish,
    form_of,
    part_of,
)
from cotune.integrations.apps.patching import inside, replace_method
from cotune.integrations.versions import missing_hook
from cotune.recording.context import current_episode, identify, opened_call
from cotune.recording.model_calls import (
    UNREADABLE,
    answer,
    answer_blocking,
    failed,
    raised,
    reason_of,
    warn_unrecorded,
)
from cotune.recording.recorder import INTERRUPTED, LiveCall, LiveEpisode
from cotune.records.answers import Answer
from cotune.records.blame import refusal
from cotune.records.structs import CallStatus
from cotune.runtime.context_vars import setting


class _Exchange(msgspec.Struct):
    """One request of the application with all the retries that the SDK makes of it."""

    call: LiveCall | None = None
    asked: dict[str, Any] = {}
    failure: str | None = None

    def fail(self, error: BaseException) -> None:
        if self.call is not None:
            raised(self.call, error)


_OFFLINE = SamplerError("Nothing here answers this call, and no provider is contacted.")
_UNSEEN = ("/runs", "/batches", "/responses/compact")
"""Ends of paths behind which models answer, or will, but not in the response."""
_exchange: ContextVar[_Exchange | None] = ContextVar("cotune_openai_exchange", default=None)


def install() -> None:
    """Hook both client classes. Raises UnsupportedVersion when this openai has no such methods."""
    from openai import _base_client as base

    for client in (base.SyncAPIClient, base.AsyncAPIClient):
        for name in ("request", "_send_request"):
            if not callable(getattr(client, name, None)):
                raise missing_hook("openai", f"{client.__name__}.{name}")
    replace_method(base.SyncAPIClient, "request", _request)
    replace_method(base.SyncAPIClient, "_send_request", _sync_send)
    replace_method(base.AsyncAPIClient, "request", _request)
    replace_method(base.AsyncAPIClient, "_send_request", _async_send)


@contextlib.contextmanager
def _new_exchange() -> Iterator[None]:
    exchange = _Exchange()
    try:
        with setting(_exchange, exchange):
            yield
    except BaseException as error:
        exchange.fail(error)
        raise


def _request(original: Any) -> Any:
    return inside(original, lambda *args, **kwargs: _new_exchange())


def _sync_send(original: Any) -> Any:
    def send(self: Any, request: Any, **kwargs: Any) -> Any:
        begun = _begin(request)
        if begun is None:
            return original(self, request, **kwargs)
        if not isinstance(begun, tuple):
            return begun
        call, form, exchange = begun
        try:
            if (found := answer_blocking(call)) is not None:
                return _answered(request, call, form, exchange.asked, found)
        except Exception as error:  # noqa: BLE001
            return _refused(request, call, error)
        if call.episode.offline:
            return _refused(request, call, _OFFLINE)
        try:
            response = original(self, request, **kwargs)
        except BaseException as error:
            _attempt_failed(exchange, error)
            raise
        return _observed(response, call, form, exchange)

    return send


def _async_send(original: Any) -> Any:
    async def send(self: Any, request: Any, **kwargs: Any) -> Any:
        begun = _begin(request)
        if begun is None:
            return await original(self, request, **kwargs)
        if not isinstance(begun, tuple):
            return begun
        call, form, exchange = begun
        try:
            if (found := await answer(call)) is not None:
                return _answered(request, call, form, exchange.asked, found)
        except Exception as error:  # noqa: BLE001
            return _refused(request, call, error)
        if call.episode.offline:
            return _refused(request, call, _OFFLINE)
        try:
            response = await original(self, request, **kwargs)
        except BaseException as error:
            _attempt_failed(exchange, error)
            raise
        return _observed(response, call, form, exchange)

    return send


def _begin(request: Any) -> tuple[LiveCall, Form, _Exchange] | Any | None:
    """The call of a request, its interface and its exchange; None lets it pass, anything else refuses it."""
    episode = current_episode.get()
    if episode is None:
        return None
    form = form_of(request)
    if form is None:
        _passing(episode, request)
        return None
    exchange = _exchange.get() or _Exchange()
    call = _open(episode, form, request, exchange)
    return (call, form, exchange) if isinstance(call, LiveCall) else call


def _passing(episode: LiveEpisode, request: Any) -> None:
    """Count a request that is no call where a model answers behind it, out of sight."""
    if request.method != "POST":
        return
    if request.url.path.endswith(TEXT_COMPLETIONS):
        episode.warn(*TEXT_COMPLETION)
    elif request.url.path.endswith("/embeddings"):
        counted = episode.notes.setdefault("embeddings", Counter())
        counted[f"{request.url.host}:{request.url.port or (443 if request.url.scheme == 'https' else 80)}"] += 1
    elif request.url.path.endswith(_UNSEEN):
        kind = request.url.path.rpartition("/")[2]
        episode.warn("unseen_call", f"A request to /{kind} has models answer out of sight: that is not recorded.")


def _open(episode: LiveEpisode, form: Form, request: Any, exchange: _Exchange) -> LiveCall | Any | None:
    """The call of this request: a new one, the one that a model class has opened, or the one that is being retried.

    None lets the request pass unrecorded (counted); anything else is a response that refuses it.
    """
    if exchange.call is not None:
        exchange.call.attempts.append(exchange.failure or "unknown")
        return exchange.call
    try:
        asked = asked_in(request)
        body = form.chat(asked, episode)
        unsupported_reason = form.unsupported_reason(asked, body, episode)
        opened = opened_call.get()
        if opened is not None and not opened.on_wire and not opened.ended:
            opened.read(body)
            call = opened
        else:
            call = episode.start(identify(), body)
    except RecordError as error:
        if episode.forked and episode.gateway and str(request.url).startswith(episode.gateway):
            return None
        if episode.responder is not None:
            return _error_response(request, 409, str(error))
        warn_unrecorded(episode, error)
        return None
    except UNREADABLE as error:
        warn_unrecorded(episode, error)
        if episode.responder is not None:
            return _error_response(request, 400, f"the request cannot be read: {error!r}")
        return None
    call.on_wire = True
    call.unsupported_reason = unsupported_reason
    exchange.call, exchange.asked = call, asked
    return call


def _answered(request: Any, call: LiveCall, form: Form, asked: dict[str, Any], found: Answer) -> Any:
    content, kind = encoded(call, form, asked, found)
    response = _response(request, 200, kind, content, call.id)
    call.finish(found)
    return response


def _refused(request: Any, call: LiveCall, error: Exception) -> Any:
    text = INTERRUPTED if call.episode.interrupted else error_text(error)
    return _error_response(request, failed(call, error), text)


def _error_response(request: Any, status: int, message: str) -> Any:
    body = {"error": {"message": message, "type": "cotune", "code": status, "param": None}}
    return _response(request, status, "application/json", msgspec.json.encode(body), "cotune")


def _response(request: Any, status: int, kind: str, content: bytes, name: str) -> Any:
    """A response of the class that belongs to the request (httpx or httpx2), which the SDK must not retry."""
    package = package_of(request)
    headers = {"content-type": kind, "x-request-id": name, "x-should-retry": "false"}
    response = package.Response(status, headers=headers, content=content, request=request)
    response.elapsed = timedelta(0)
    return response


def _attempt_failed(exchange: _Exchange, error: BaseException) -> None:
    exchange.failure = ": ".join(reason_of(error))
    if _exchange.get() is None:
        exchange.fail(error)


def _observed(response: Any, call: LiveCall, form: Form, exchange: _Exchange) -> Any:
    """Record what the provider sent: now, or when the application has read the stream."""
    if response.status_code >= 400:
        cause = f"HTTP {response.status_code} {response.reason_phrase}".strip()
        exchange.failure = f"error: {cause}"
        if _exchange.get() is None:
            call.fail("error", cause, outage=not refusal(response.status_code))
        return response
    if response.is_stream_consumed:
        _settle(call, form, exchange.asked, response.headers, response.content, None, True)
    else:
        settle = functools.partial(_settle, call, form, exchange.asked, response.headers)
        package = package_of(response)
        response.stream = stream = _tee_class(package)(package, response, settle)
        call.cancel = functools.partial(stream.settle, None)
    return response


def _settle(
    call: LiveCall,
    form: Form,
    asked: dict[str, Any],
    headers: Any,
    raw: bytes,
    error: BaseException | None,
    ended: bool,
) -> None:
    """End the call with the decoded body; `error` is what interrupted its stream, `ended` whether all of it came."""
    streamed = call.streamed and "text/event-stream" in headers.get("content-type", "")
    if error is not None:
        raised(call, error, part_of(form, raw, streamed))
    elif not (ended or streamed) or not finish(call, form, asked, raw, streamed):
        status: CallStatus = "malformed" if ended else "cancelled"
        cause = "the answer ended" if ended else "the application stopped reading the answer"
        call.fail(status, f"{cause} after {len(raw)} bytes, before it was whole", part_of(form, raw, streamed))


def package_of(message: Any) -> Any:
    """The package that a request or response belongs to, itself or by a base class: httpx or httpx2."""
    packages = (cls.__module__.partition(".")[0] for cls in type(message).__mro__)
    return sys.modules[next(name for name in packages if name.startswith("httpx"))]


class _Tee:
    """The stream of a response: the application gets every chunk when it comes, the recorder all at its close."""

    def __init__(
        self, package: Any, response: Any, settle: Callable[[bytes, BaseException | None, bool], None]
    ) -> None:
        self._inner = response.stream
        self._encoding = response.headers.get("content-encoding")
        self._package = package
        self._settle = settle
        self._chunks: list[bytes] = []
        self._settled = False
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        with self._reading():
            for chunk in self._inner:
                self._chunks.append(chunk)
                yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._reading():
            async for chunk in self._inner:
                self._chunks.append(chunk)
                yield chunk

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self.settle(error)
            raise
        self._ended = True

    def close(self) -> None:
        self.settle(None)
        self._inner.close()

    async def aclose(self) -> None:
        self.settle(None)
        await self._inner.aclose()

    def settle(self, error: BaseException | None) -> None:
        """End the record with what was read; only the first call counts."""
        if self._settled:
            return
        self._settled = True
        raw = b"".join(self._chunks)
        if self._encoding:
            try:
                raw = self._package.Response(200, headers={"content-encoding": self._encoding}, content=raw).content
            except self._package.DecodingError as broken:
                raw, error = b"", error or broken
        self._settle(raw, error, self._ended)


@functools.cache
def _tee_class(package: Any) -> type[_Tee]:
    return type("Tee", (_Tee, package.SyncByteStream, package.AsyncByteStream), {})
