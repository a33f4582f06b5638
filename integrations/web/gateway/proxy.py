"""The ASGI application that forwards requests to the provider unchanged, and records the calls among them."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from dataclasses import dataclass
from http.client import responses
from typing import Any

from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send

from cotune.errors import error_text
from cotune.integrations.apps.openai.chat_request import check_sampling
from cotune.integrations.apps.openai.embeddings import count_embeddings, fixed_embeddings
from cotune.integrations.apps.openai.forms import TEXT_COMPLETION, TEXT_COMPLETIONS, Form
from cotune.integrations.web.gateway.address import Address, caller_identity
from cotune.integrations.web.gateway.episodes import Episodes
from cotune.integrations.web.gateway.exchange import Exchange, read_call
from cotune.integrations.web.gateway.settings import GatewayConfig
from cotune.integrations.web.gateway.upstream import Upstream, UpstreamError, forwarded
from cotune.integrations.web.http.bodies import in_thread_if_large, room_for, size_of_body
from cotune.integrations.web.http.requests import (
    Access,
    ClientGone,
    RequestError,
    header,
    read_any,
    read_body,
    unless_gone,
)
from cotune.recording.model_calls import answer, record_failure
from cotune.recording.recorder import LiveEpisode
from cotune.records.failure_cause import is_refusal_status

KEYS = (b"authorization", b"x-api-key")
"""Headers that carry a client's API key."""


@dataclass
class _Passage:
    """One request in flight, with the progress of its answer and its call."""

    scope: Scope
    address: Address
    receive: Receive
    _send: Send
    started: bool = False
    """Whether the response has begun."""
    done: bool = False
    """Whether the response was sent whole."""
    exchange: Exchange | None = None
    """The call that the request makes; None for other requests, and for calls that are not recorded."""

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, chunk: bytes, more: bool = True) -> None:
        self.done = not more
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})


class Proxy:
    """Answers requests to the interfaces of OpenAI and Anthropic. `counts` counts requests by outcome."""

    def __init__(self, config: GatewayConfig, episodes: Episodes, access: Access) -> None:
        """A proxy for the providers that `config` names, which records the calls of `episodes`.

        Anthropic's API may have a provider of its own; otherwise its requests go to the same one.
        """
        self.upstream = Upstream(config.upstream, config.key)
        self.anthropic = Upstream(config.anthropic, config.anthropic_key) if config.anthropic else self.upstream
        self.episodes = episodes
        self.access = access
        self.limits = config.limits
        self.room = room_for(config.limits)
        self.role_header = config.role_header
        self.in_flight = 0
        self.counts: Counter[str] = Counter()

    async def __call__(self, address: Address, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. If the provider's answer breaks off, the response is left incomplete, so that the client
        notices.
        """
        self.access.check(scope)
        if self.in_flight >= self.limits.max_inflight:
            raise RequestError(
                429,
                f"{self.limits.max_inflight} requests are in flight already.",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        passage = _Passage(scope, address, receive, send)
        self.in_flight += 1
        try:
            await self._pass_within_limits(passage)
            self.counts["passed"] += 1
        except RequestError as error:
            if passage.started:
                self.counts["broken_off"] += 1
                return
            raise error
        finally:
            self.in_flight -= 1

    async def _pass_within_limits(self, passage: _Passage) -> None:
        """Pass a request on, within the time limit. An interruption ends its call, and is answered with the cause."""
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self._pass(passage)
            # A provider's answer is recorded once the client has it. If it is not complete, its call fails.
            if (exchange := passage.exchange) is not None and (exchange.answering or exchange.refusal):
                await exchange.settle("malformed", f"the answer is not whole, after {exchange.size} bytes")
        except ClientGone:
            self.counts["disconnected"] += 1
            await self._interrupted(passage, "cancelled", "the client went away")
        except TimeoutError:
            text = f"The request took longer than the gateway's {self.limits.timeout:g} seconds."
            await self._interrupted(passage, "timeout", text)
            raise RequestError(504, text, code="timeout") from None
        except UpstreamError as error:
            text = f"The provider's answer broke off: {error}" if passage.started else f"The provider failed: {error}"
            await self._interrupted(passage, "error", text)
            raise RequestError(502, text, code="upstream_failed") from None
        except RequestError as error:
            await self._interrupted(passage, "error", error.message)
            raise
        except asyncio.CancelledError:
            # A request is cancelled when its episode ends, which has ended its call before, or when the gateway stops.
            episode_has_ended = passage.exchange is not None and passage.exchange.call.ended and not passage.done
            if episode_has_ended:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
                text = "The episode ended before the call did."
                raise RequestError(409, text, code="episode_ended", headers={"x-should-retry": "false"}) from None
            if passage.exchange is not None:
                passage.exchange.settle_now("cancelled", "the gateway stopped")
            raise

    async def _interrupted(self, passage: _Passage, status: Any, text: str) -> None:
        """End the call of a request that broke off, with the part of the answer that was received."""
        exchange = passage.exchange
        if exchange is None:
            return
        if exchange.answering:
            text = f"{text}, after {exchange.size} bytes of the answer"
        if exchange.call.streamed or exchange.refusal or status == "cancelled":
            await exchange.settle(status, text)
        else:
            # A client cannot use a part of an answer that is no stream.
            await exchange.fail(status, text)

    async def _pass(self, passage: _Passage) -> None:
        """Read a request and answer it. The request of a call opens the call first."""
        scope = passage.scope
        address = passage.address
        sends_our_token = any(self.access.carries_token(scope, name) for name in KEYS)
        headers = self._provider(scope, address).request_headers(scope["headers"], replace_key=sends_our_token)
        if address.form is not None and scope["method"] == "POST":
            raw = await self._read_and_open_call(passage, address.form, headers)
        elif scope["method"] == "POST":
            raw = await read_body(scope, passage.receive, self.limits.max_body, self.room)
            episode = self.episodes.live(caller_identity(scope, address).episode)
            if address.tail == TEXT_COMPLETIONS.strip("/"):
                # The episode counts the warning. If the request belongs to none, the gateway counts it.
                counts_warning = episode if episode is not None else self.episodes
                counts_warning.warn(*TEXT_COMPLETION)
            if episode is not None and episode.fixed_embeddings and address.tail == "embeddings":
                await self._answer_with_fixed_embeddings(passage, episode, raw)
                return
        else:
            raw = await read_any(scope, passage.receive, self.limits.max_body, self.room)
        await unless_gone(passage.receive, functools.partial(self._answer, passage, headers, raw))

    async def _read_and_open_call(self, passage: _Passage, form: Form, headers: CIMultiDict[str]) -> bytes:
        """Read the request of a call, and open the call. Returns the body to forward, with the edited prompts.

        An edited body has no content coding, so this header is removed from `headers`.
        """
        scope = passage.scope
        raw = await read_body(scope, passage.receive, self.limits.max_body, self.room)
        coding = header(scope, b"content-encoding").decode("latin-1")
        size = size_of_body(raw, coding)
        call_body = await in_thread_if_large(size, functools.partial(read_call, form, raw, coding, self.limits))
        await self._open_call(passage, form, call_body, size)
        exchange = passage.exchange
        if exchange is None or exchange.call.edits is None:
            return raw
        headers.popall("content-encoding", None)
        return await exchange.outgoing(raw, coding)

    async def _answer_with_fixed_embeddings(self, passage: _Passage, episode: LiveEpisode, raw: bytes) -> None:
        """Answer a request for embeddings with fixed vectors, in an episode that contacts no provider."""
        count_embeddings(episode, "the gateway")
        try:
            content = fixed_embeddings(raw)
        except ValueError as error:
            raise RequestError(400, f"The request cannot be read: {error}.", code="invalid_body") from None
        length = str(len(content)).encode()
        await passage.start(200, [(b"content-type", b"application/json"), (b"content-length", length)])
        await passage.body(content, more=False)

    def _provider(self, scope: Scope, address: Address) -> Upstream:
        """The provider of a request. Anthropic's clients send the version of its interface in a header."""
        for_anthropic = address.tail.startswith("messages") or header(scope, b"anthropic-version")
        return self.anthropic if for_anthropic else self.upstream

    async def _open_call(self, passage: _Passage, form: Form, body: dict[str, Any], size: int) -> None:
        """Open the call of a request in its episode. When the episode ends, it cancels this request."""
        scope = passage.scope
        identity = caller_identity(scope, passage.address, self.role_header)
        session = None
        if identity.episode is None:
            # The request names no episode. The user's settings may assign it to one.
            session = self.episodes.config.split.of(scope)
        episode = self.episodes.live(identity.episode)
        if episode is not None and episode.responder is not None:
            check_sampling(body)
        passage.exchange = await self.episodes.exchange(identity, form, body, session, size)
        if passage.exchange is not None:
            loop = asyncio.get_running_loop()
            task = asyncio.current_task()
            assert task is not None
            passage.exchange.call.cancel_by(functools.partial(loop.call_soon_threadsafe, task.cancel))

    async def _answer_with_policy(self, passage: _Passage) -> bool:
        """Answer with a policy of the episode. Returns False if no policy plays the role, so that the provider must
        answer.
        """
        exchange = passage.exchange
        assert exchange is not None
        call = exchange.call
        cancel_request = call.cancel
        assert cancel_request is not None
        try:
            reply = await answer(call)
            if reply is None:
                # `answer` has set a function that cancels the policy's work. From now on the request is cancelled.
                call.cancel_by(cancel_request)
                return False
            content, kind = await exchange.answered(reply)
        except Exception as error:  # noqa: BLE001
            text = error_text(error)
            status = record_failure(call, error)
            exchange.over()
            raise RequestError(status, text, code="cotune", headers={"x-should-retry": "false"}) from None
        length = str(len(content)).encode()
        fields = [(b"content-type", kind.encode()), (b"content-length", length), (b"x-should-retry", b"false")]
        await passage.start(200, [*fields, *_identity_headers(exchange)])
        await passage.body(content, more=False)
        return True

    async def _answer(self, passage: _Passage, headers: CIMultiDict[str], raw: bytes) -> None:
        """Answer with a policy of the episode; if it has none, forward the request and return the provider's bytes."""
        scope = passage.scope
        address = passage.address
        exchange = passage.exchange
        has_policies = exchange is not None and exchange.call.episode.responder is not None
        if has_policies and await self._answer_with_policy(passage):
            return
        upstream = self._provider(scope, address)
        method = scope["method"]
        query = scope["query_string"]
        async with upstream.send(method, address.tail, query, headers, raw) as reply:
            fields = forwarded(((name.lower(), value) for name, value in reply.raw_headers), ())
            if exchange is not None:
                fields += _identity_headers(exchange)
                if 200 <= reply.status < 300:
                    exchange.begins(reply.headers.get("content-type", ""), reply.headers.get("content-encoding", ""))
                else:
                    cause = f"HTTP {reply.status} {responses.get(reply.status, '')}".strip()
                    exchange.refuse(cause, outage=not is_refusal_status(reply.status))
            await passage.start(reply.status, fields)
            async for chunk in reply.content.iter_any():
                if exchange is not None and exchange.answering:
                    exchange.add(chunk)
                await passage.body(chunk)
        await passage.body(b"", more=False)


def _identity_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    call = exchange.call
    return [(b"x-cotune-call", call.id.encode()), (b"x-cotune-episode", call.episode.id.encode())]
