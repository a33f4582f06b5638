"""Hooks the OpenAI SDK. Every request of a client passes through `_send_request`, and is recorded or answered there.

Works with openai 2.45 and later and with 3.x. Outside an episode each hook costs one read of a ContextVar.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec

from cotune.errors import RecordError, SamplerError, error_text
from cotune.integrations.apps.openai.embeddings import count_embeddings, fixed_embeddings
from cotune.integrations.apps.openai.forms import (
    CHAT,
    FORMS,
    TEXT_COMPLETION,
    TEXT_COMPLETIONS,
    Form,
    edited_body,
    end_with_body,
    part_of,
)
from cotune.integrations.apps.patching import replace_method
from cotune.integrations.versions import require_hooks
from cotune.recording.context import current_episode, identify, opened_call
from cotune.recording.edits import undo_edits
from cotune.recording.model_calls import (
    UNREADABLE,
    answer,
    answer_blocking,
    fail_with_error,
    reason_of,
    record_failure,
    warn_unrecorded,
)
from cotune.recording.recorder import INTERRUPTED, LiveCall, LiveEpisode
from cotune.records.answers import Answer
from cotune.records.failure_cause import is_refusal_status
from cotune.records.structs import CallStatus

_NOBODY_ANSWERS = SamplerError("Nothing here answers this call, and no provider is contacted.")
_UNRECORDED_PATHS = ("/runs", "/batches", "/responses/compact")
"""Endings of paths whose requests start models, but whose responses do not hold the models' answers."""


def install() -> None:
    """Hook both client classes. Raises UnsupportedVersion if this version of openai lacks a method."""
    from openai import _base_client as base

    # Both classes are checked before one is changed.
    for client in (base.SyncAPIClient, base.AsyncAPIClient):
        require_hooks("openai", client, "request", "_send_request")
    replace_method(base.SyncAPIClient, "request", _wrap_request)
    replace_method(base.SyncAPIClient, "_send_request", _send)
    replace_method(base.AsyncAPIClient, "request", _request_async)
    replace_method(base.AsyncAPIClient, "_send_request", _send_async)


@dataclass(eq=False, slots=True)
class _Exchange:
    """One request of the application with all retries of the SDK, which are one call of the episode."""

    may_retry: bool
    """Whether the SDK may retry after a failure. If so, the call ends with the request, not with a failed attempt."""
    form: Form = CHAT
    request_body: dict[str, Any] = field(default_factory=dict)
    call: LiveCall = None  # type: ignore[assignment]  # set once there is a request
    failure: str = "unknown"
    """Reason of the last failed attempt."""
    awaits_retry: bool = False
    """Whether the last attempt has failed and the next one has not begun."""
    edits: bool = False
    """Whether the prompts of the call are edited here, in each attempt."""

    def outgoing(self, request: Any) -> Any:
        """The request to send: the application's own, or a copy with edited prompts."""
        if not self.edits:
            return request
        content = edited_body(self.call, self.form, self.request_body, request.content)
        headers = request.headers.copy()
        headers["content-length"] = str(len(content))
        request_class = package_of(request).Request
        return request_class(
            request.method, request.url, headers=headers, content=content, extensions=request.extensions
        )

    def answered(self, request: Any, answer: Answer) -> Any:
        """The response that returns a policy's answer; ends the call."""
        content, kind = self.form.content(self.call, answer, self.request_body)
        response = _make_response(request, 200, kind, content, self.call.id)
        self.call.finish(answer)
        return response

    def refused(self, request: Any, error: Exception) -> Any:
        """The response that reports an error of the responder; ends the call."""
        text = INTERRUPTED if self.call.episode.interrupted else error_text(error)
        return _error_response(request, record_failure(self.call, error), text)

    def attempt_failed(self, error: BaseException) -> None:
        """Note the error of an attempt. The call ends with it unless the SDK may retry."""
        self.failure = ": ".join(reason_of(error))
        # An error that is no Exception cancels the request, so the SDK does not retry.
        self.awaits_retry = isinstance(error, Exception)
        if not self.may_retry:
            fail_with_error(self.call, error)

    def observed(self, response: Any) -> Any:
        """Record the provider's answer: now, or once the application has read the stream. Returns `response`, whose
        stream is replaced by one that keeps a copy.
        """
        if response.status_code >= 400:
            cause = f"HTTP {response.status_code} {response.reason_phrase}".strip()
            self.failure = f"error: {cause}"
            self.awaits_retry = True
            if not self.may_retry:
                self.call.fail("error", cause, outage=not is_refusal_status(response.status_code))
            return response
        end_call = functools.partial(self.settle, response.headers)
        if response.is_stream_consumed:
            end_call(response.content, error=None, ended=True)
        else:
            package = package_of(response)
            copying_stream = _tee_class(package)(package, response, end_call)
            response.stream = copying_stream
            self.call.cancel_by(functools.partial(copying_stream.settle, error=None))
        return response

    def settle(self, headers: Any, raw: bytes, error: BaseException | None, ended: bool) -> None:
        """End the call with `raw`, the decoded body of the provider's answer.

        `error` is the error that interrupted the stream, if any. `ended` is True if the stream was read to its end, and
        False if the application stopped reading it.
        """
        call = self.call
        form = self.form
        streamed = call.streamed and "text/event-stream" in headers.get("content-type", "")
        if error is not None:
            fail_with_error(call, error, part_of(form, raw, streamed))
            return
        # A stream may be complete although the application stopped reading it, as after its last event.
        if (ended or streamed) and end_with_body(call, form, self.request_body, raw, streamed):
            return
        status: CallStatus = "malformed" if ended else "cancelled"
        cause = "the answer ended" if ended else "the application stopped reading the answer"
        call.fail(status, f"{cause} after {len(raw)} bytes, before it was whole", part_of(form, raw, streamed))


_exchange: ContextVar[_Exchange | None] = ContextVar("cotune_openai_exchange", default=None)


# Stage 1: the application's request begins an exchange, which ends with it.


@contextlib.contextmanager
def _open_exchange() -> Iterator[None]:
    """Open an exchange for one request and its retries. An error that escapes ends the call of the request."""
    exchange = _Exchange(may_retry=True)
    token = _exchange.set(exchange)
    try:
        yield
    except BaseException as error:
        if exchange.call is not None:
            if exchange.awaits_retry and not isinstance(error, Exception):
                # Cancelled while the SDK waited to try again: the last attempt had ended before.
                exchange.call.attempts.append(exchange.failure)
            fail_with_error(exchange.call, error)
        raise
    finally:
        _exchange.reset(token)


def _wrap_request(original: Any) -> Any:
    """Wrap the blocking `request`, which contains the retries."""

    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None:
            return original(self, *args, **kwargs)
        with _open_exchange():
            return original(self, *args, **kwargs)

    return request


def _request_async(original: Any) -> Any:
    """Wrap the asynchronous `request`, which contains the retries."""

    async def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None:
            return await original(self, *args, **kwargs)
        with _open_exchange():
            return await original(self, *args, **kwargs)

    return request


# Stage 2: each attempt to send it is answered by the episode's responder, or sent and observed.


def _send(original: Any) -> Any:
    """Wrap the blocking `_send_request`, one attempt: the responder answers it, or the attempt is sent and observed."""

    def send(self: Any, request: Any, **kwargs: Any) -> Any:
        """Send a request of the SDK. If it is a call of an episode, the responder may answer it, and edited prompts
        replace the application's; the provider's answer is recorded.
        """
        exchange = _exchange_of(request)
        if exchange is None:
            return original(self, request, **kwargs)  # no call that is recorded
        if not isinstance(exchange, _Exchange):
            return exchange  # a response that refuses the request
        try:
            if (reply := answer_blocking(exchange.call)) is not None:
                return exchange.answered(request, reply)
        except Exception as error:  # noqa: BLE001
            return exchange.refused(request, error)
        if exchange.call.episode.offline:
            return exchange.refused(request, _NOBODY_ANSWERS)
        try:
            response = original(self, exchange.outgoing(request), **kwargs)
        except BaseException as error:
            exchange.attempt_failed(error)
            raise
        return exchange.observed(response)

    return send


def _send_async(original: Any) -> Any:
    """Wrap the asynchronous `_send_request`; see `_send`."""

    async def send(self: Any, request: Any, **kwargs: Any) -> Any:
        """The async form of `send` above: the responder or the provider answers, and the call is recorded."""
        exchange = _exchange_of(request)
        if exchange is None:
            return await original(self, request, **kwargs)  # no call that is recorded
        if not isinstance(exchange, _Exchange):
            return exchange  # a response that refuses the request
        try:
            if (reply := await answer(exchange.call)) is not None:
                return exchange.answered(request, reply)
        except Exception as error:  # noqa: BLE001
            return exchange.refused(request, error)
        if exchange.call.episode.offline:
            return exchange.refused(request, _NOBODY_ANSWERS)
        try:
            response = await original(self, exchange.outgoing(request), **kwargs)
        except BaseException as error:
            exchange.attempt_failed(error)
            raise
        return exchange.observed(response)

    return send


def _exchange_of(request: Any) -> _Exchange | Any | None:
    """Find or begin the exchange of a request: the request with all its retries, which are one call of the episode.

    Returns None if the request is sent without being recorded, which counts a warning. Any object that is not an
    `_Exchange` is a response of httpx: it answers the request, mostly with an error, and nothing is sent.
    """
    episode = current_episode.get()
    if episode is None:
        return None
    form = _form_of(request)
    if form is None:
        _warn_of_unrecorded(episode, request)
        asks_for_embeddings = request.method == "POST" and request.url.path.endswith("/embeddings")
        if episode.fixed_embeddings and asks_for_embeddings:
            return _make_response(request, 200, "application/json", fixed_embeddings(request.content), "cotune")
        return None
    # Requests that do not come from the SDK's `request` have no open exchange, and are not retried.
    exchange = _exchange.get() or _Exchange(may_retry=False)
    if exchange.call is not None:
        # The SDK tries the request again.
        exchange.call.attempts.append(exchange.failure)
        exchange.awaits_retry = False
        return exchange
    try:
        _begin_call(exchange, episode, form, request.content)
    except RecordError as error:  # the episode has ended
        is_sent_to_gateway = episode.gateway and str(request.url).startswith(episode.gateway)
        if episode.forked and is_sent_to_gateway:
            return None  # the gateway of the same run records this request
        if episode.responder is not None:
            # A policy would have to answer, so the request must not reach the provider.
            return _error_response(request, 409, str(error))
        warn_unrecorded(episode, error)
        return None
    except UNREADABLE as error:
        warn_unrecorded(episode, error)
        if episode.responder is not None:
            return _error_response(request, 400, f"the request cannot be read: {error!r}")
        return None
    return exchange


def _begin_call(exchange: _Exchange, episode: LiveEpisode, form: Form, content: bytes) -> None:
    """Begin the call of a request, or use the call that a model class has opened for it, and store it in `exchange`.

    Raises RecordError if the episode has ended, and one of `UNREADABLE` for a body that is no request of this form.
    """
    request_body = msgspec.json.decode(content)
    if not isinstance(request_body, dict):
        raise ValueError("the body is not a JSON object")
    chat_body, unsupported_reason = form.read(request_body, episode)
    # A model class of a framework, such as LangChain's, opens a call before it uses the SDK.
    call_of_class = opened_call.get()
    if call_of_class is not None and not call_of_class.on_wire and not call_of_class.ended:
        call = call_of_class
        if call.rewritten is None:
            # The request also has parameters that the model class did not know, such as those of its client.
            call.read(chat_body)
    else:
        # Without a model class, or for its second request, this request is a call of its own.
        unedited_body = undo_edits(call_of_class, chat_body)
        call = episode.start(identify(), unedited_body)
        # If a model class has edited the prompts already, they must not be edited twice.
        was_edited = unedited_body is not chat_body
        exchange.edits = call.rewritten is not None and not was_edited
    call.on_wire = True
    call.unsupported_reason = unsupported_reason
    exchange.call = call
    exchange.form = form
    exchange.request_body = request_body


def _form_of(request: Any) -> Form | None:
    """The interface that a request calls a model through; None for other requests."""
    if request.method == "POST":
        for form in FORMS:
            if request.url.path.endswith(form.path):
                return form
    return None


def _warn_of_unrecorded(episode: LiveEpisode, request: Any) -> None:
    """Warn of a request that is no recorded call although a model works on it."""
    if request.method != "POST":
        return
    if request.url.path.endswith(TEXT_COMPLETIONS):
        episode.warn(*TEXT_COMPLETION)
    elif request.url.path.endswith("/embeddings"):
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        count_embeddings(episode, f"{request.url.host}:{port}")
    elif request.url.path.endswith(_UNRECORDED_PATHS):
        kind = request.url.path.rpartition("/")[2]
        episode.warn("unseen_call", f"A request to /{kind} has models answer out of sight: that is not recorded.")


def _error_response(request: Any, status: int, message: str) -> Any:
    body = {"error": {"message": message, "type": "cotune", "code": status, "param": None}}
    return _make_response(request, status, "application/json", msgspec.json.encode(body), "cotune")


def _make_response(request: Any, status: int, kind: str, content: bytes, name: str) -> Any:
    """A response of the request's package (httpx or httpx2), with a header that keeps the SDK from retrying."""
    headers = {"content-type": kind, "x-request-id": name, "x-should-retry": "false"}
    response = package_of(request).Response(status, headers=headers, content=content, request=request)
    response.elapsed = timedelta(0)
    return response


def package_of(message: Any) -> Any:
    """The package that the class of a request or response, or a base of it, comes from: httpx or httpx2."""
    for cls in type(message).__mro__:
        if (name := cls.__module__.partition(".")[0]).startswith("httpx"):
            return sys.modules[name]
    raise TypeError(f"{message!r} is of neither httpx nor httpx2")


class _Tee:
    """Wraps the stream of a response. The application gets each chunk at once, the recorder all of them at the end."""

    def __init__(
        self, package: Any, response: Any, end_call: Callable[[bytes, BaseException | None, bool], None]
    ) -> None:
        """Pass on the body of a response and keep a copy, from which the answer is recorded at its end.

        Args:
            package: httpx, or a package with the same classes.
            end_call: called once with the copy, the error that interrupted it, and whether it was read to its end.
        """
        self._inner = response.stream
        self._encoding = response.headers.get("content-encoding")
        self._package = package
        self._end_call = end_call
        self._chunks: list[bytes] = []
        self._settled = False
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        with self._noting_end():
            for chunk in self._inner:
                self._chunks.append(chunk)
                yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._noting_end():
            async for chunk in self._inner:
                self._chunks.append(chunk)
                yield chunk

    @contextlib.contextmanager
    def _noting_end(self) -> Iterator[None]:
        """Note how reading the stream ends: with an error, at its end, or because the application stopped."""
        try:
            yield
        except GeneratorExit:
            # The application stopped reading, which is no error of the stream. `close` ends the call.
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
        """End the recorded call with the chunks that were read. Only the first use of this method has an effect.

        `error` is the error that interrupted the stream, or None.
        """
        if self._settled:
            return
        self._settled = True
        body = b"".join(self._chunks)
        cause = error
        if self._encoding:
            # The chunks are compressed. A response of httpx decodes them.
            headers = {"content-encoding": self._encoding}
            try:
                body = self._package.Response(200, headers=headers, content=body).content
            except self._package.DecodingError as decoding_error:
                body = b""
                if cause is None:
                    cause = decoding_error
        self._end_call(body, cause, self._ended)


@functools.cache
def _tee_class(package: Any) -> type[_Tee]:
    return type("Tee", (_Tee, package.SyncByteStream, package.AsyncByteStream), {})


_SOCKETS = (
    "openai.resources.responses.responses",
    "openai.resources.beta.responses.responses",
    "openai.resources.realtime.realtime",
    "openai.resources.beta.realtime.realtime",
)


def install_sockets() -> None:
    """Warn of sockets, whose answers are not recorded: wrap `connect` in the modules that are loaded.

    It is called again for each module that is loaded later.
    """
    for name in _SOCKETS:
        module = sys.modules.get(name)
        if module is None:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type):
                replace_method(value, "connect", _warn_at_connect)


def _warn_at_connect(original: Any) -> Any:
    """Wrap `connect` of a socket class: warn that its answers are not recorded."""

    def connect(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Open the socket as before, and warn that calls through it are not recorded."""
        episode = current_episode.get()
        if episode is not None:
            episode.warn(
                "unseen_call",
                f"{type(self).__name__}.connect opens a socket on which a model answers: what it says there is not "
                "recorded. Use requests (client.responses.create) instead.",
            )
        return original(self, *args, **kwargs)

    return connect
