"""POST /v1/chat/completions as an ASGI application over a sampler."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from cotune.adapters.conversations import Conversations, Place
from cotune.adapters.open_policies import Local, Served
from cotune.adapters.openai_http import ChatRequest, Reply, completion, decode_request, events
from cotune.errors import PromptTooLong, RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.http.requests import (
    Access,
    ClientGone,
    RequestError,
    read_body,
    send_error,
    send_json,
    unless_gone,
)
from cotune.recording.records import Candidate, Usage
from cotune.sampling.protocol import Completion, SamplingParams
from cotune.sampling.request_params import fixes_form, template_options, tools_shown

logger = logging.getLogger("cotune.serve")
LONG = 256 << 10
"""Bytes of a request from which on its prompt is rendered when no other such prompt is."""


class ChatEndpoint:
    """Answers chat completions. `counts` tells requests by outcome, `not_enforced` the fields answered without,
    `unlisted` the model names that nothing here is trained for."""

    def __init__(self, local: Local, access: Access, *, max_body: int) -> None:
        self.local = local
        self.access = access
        self.max_body = max_body
        self.in_flight = 0
        self.counts: Counter[str] = Counter()
        self.not_enforced: Counter[str] = Counter()
        self.conversations = Conversations()
        self._long = ThreadPoolExecutor(1, "cotune-long-prompts")
        self.unlisted: Counter[str] = Counter()
        self._token_texts: dict[int, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.in_flight += 1
        try:
            await self._serve(scope, receive, send)
        except RequestError as error:
            self.counts[f"refused_{error.status}"] += 1
            await send_error(send, error)
        finally:
            self.in_flight -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.access.check(scope)
        body = await read_body(scope, receive, self.max_body)
        request = decode_request(body)
        long = len(body) > LONG
        del body
        try:
            reply = await unless_gone(receive, lambda: self._reply(request, long))
        except ClientGone:
            self.counts["disconnected"] += 1
            return
        self.counts["ok"] += 1
        if request.stream:
            await _send_events(send, events(reply, self._token_text))
        else:
            await send_json(send, 200, completion(reply, self._token_text))

    async def _reply(self, request: ChatRequest, long: bool) -> Reply:
        served = self.find(request.model)
        place, prompt = await self._prompt(request, served, long)
        params = await asyncio.to_thread(self._params, request, prompt)
        completions = await self._sample(prompt, request.n or 1, params, served)
        candidates = [self._candidate(request, prompt, params, i, c) for i, c in enumerate(completions)]
        self.conversations.keep(place, prompt, candidates[0].message, candidates[0].token_ids)
        return Reply(
            prompt_ids=prompt,
            candidates=candidates,
            usage=Usage(len(prompt), sum(len(c.token_ids) for c in completions)),
            request=request,
        )

    def find(self, model: str) -> Served:
        """What answers for a model name. Raises RequestError (404) with the known names."""
        found = self.local.served.get(model)
        if found is not None:
            return found
        known = ", ".join(self.local.served)
        if self.local.others is None or model in self.local.left_to_provider:
            raise RequestError(
                404,
                f"There is no model {model!r} here; the models are: {known}.",
                param="model",
                code="model_not_found",
            )
        if not self.unlisted[model]:
            logger.warning("There is no model %r here (there are: %s): the untrained model answers.", model, known)
        self.unlisted[model] += 1
        return self.local.others

    def _params(self, request: ChatRequest, prompt: list[int]) -> SamplingParams:
        """How a reply is sampled, its form included, which may take a while to compile."""
        asked = request.asked()
        try:
            params = request.sampling(self.local.max_model_len - len(prompt))
            if fixes_form(asked, request.tools):
                params = msgspec.structs.replace(params, grammar=self.local.chat.grammar(asked, request.tools, prompt))
        except SamplerError as error:
            raise RequestError(400, str(error), code="invalid_value") from None
        return params

    def _note(self, request: ChatRequest, options: Mapping[str, Any]) -> None:
        """Count what a request asks and does not get."""
        names = [name for name in options if not self.local.chat.reads(name)]
        for name in [*names, *(["top_logprobs"] if request.top_logprobs else [])]:
            if not self.not_enforced[name]:
                logger.warning("A request sets %s, which is not enforced: its answers are sampled without.", name)
            self.not_enforced[name] += 1

    async def _prompt(self, request: ChatRequest, served: Served, long: bool) -> tuple[Place, list[int]]:
        """Rendered in a thread, so that a long prompt delays nobody else; very long ones one after the other."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._long if long else None, self._render, request, served)
        except PromptTooLong as error:
            code = "context_length_exceeded"
            raise RequestError(400, error.cause, param="messages", code=code) from None
        except SamplerError as error:
            raise RequestError(400, str(error), param="messages", code="invalid_value") from None

    def _render(self, request: ChatRequest, served: Served) -> tuple[Place, list[int]]:
        place = self.conversations.find(served.name, request.messages)
        most = self.local.max_model_len - 1
        asked = request.asked()
        options = template_options(asked)
        self._note(request, options)
        shown: dict[str, Any] = {"options": options} if options else {}
        tools = tools_shown(asked, request.tools)
        prompt = self.local.chat.render(request.messages, tools, earlier=place.paths, most=most, **shown)
        if len(prompt) > most:  # earlier ids may be more than the template's
            raise PromptTooLong(f"The prompt has {len(prompt)} tokens; the model takes {most + 1} with the reply.")
        return place, prompt

    async def _sample(self, prompt: list[int], n: int, params: SamplingParams, served: Served) -> list[Completion]:
        try:
            return await self.local.sampler.sample(prompt, n, params, served.policy)
        except SampleTimeout as error:
            raise RequestError(504, str(error), code="timeout") from None
        except RequestRefused as error:
            raise RequestError(400, str(error), code="invalid_value") from None
        except SamplerError as error:
            logger.error("The sampler failed: %s", error)
            raise RequestError(500, str(error), code="sampler_error") from None

    def _candidate(
        self, request: ChatRequest, prompt: list[int], params: SamplingParams, index: int, sampled: Completion
    ) -> Candidate:
        parse, tools = self.local.chat.parse, tools_shown(request.asked(), request.tools)
        text, message, finish = parse(sampled.token_ids, params.stop, prompt=prompt, tools=tools)
        if malformed := finish == "malformed":
            finish = "tool_calls" if message.get("tool_calls") else "stop"
        return Candidate(
            index=index,
            text=text,
            message=message,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reason="length" if sampled.finish_reason == "length" else finish,
            malformed=malformed,
        )

    def _token_text(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self.local.token_text(token)
        return text


async def _send_events(send: Send, content: bytes) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
