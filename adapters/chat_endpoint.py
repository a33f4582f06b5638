"""Answers POST /v1/chat/completions with role policies, and records the requests if asked to."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cotune.adapters.conversations import LocalResponder
from cotune.adapters.model_names import ModelNames, name_models
from cotune.adapters.open_policies import LocalPolicies, ServedModel
from cotune.errors import PromptTooLong, RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.apps.openai.chat_request import ChatRequest
from cotune.integrations.apps.openai.forms import CHAT
from cotune.integrations.web.http.bodies import read_json, room_for
from cotune.integrations.web.http.limits import BodyLimits
from cotune.integrations.web.http.requests import (
    Access,
    ClientGone,
    RequestError,
    checked_key,
    header,
    invalid_value,
    refusal,
    unless_gone,
)
from cotune.prompts.edits import Prompts
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode, Nowhere, Sink
from cotune.recording.redaction import Redactor
from cotune.records.answers import Answer
from cotune.records.structs import CallStatus, Task
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.request_params import template_options, unknown_fields

logger = logging.getLogger("cotune.serve")


@dataclass(frozen=True)
class Recording:
    """The place that answered requests are recorded in, each as an episode of one call, and the redactors to apply."""

    sink: Sink
    app: str = ""
    redactors: Sequence[Redactor] = ()


class ChatEndpoint:
    """POST /v1/chat/completions over policies, as an ASGI application.

    `counts` counts requests by outcome. `not_enforced` counts request fields that answers did not follow.
    """

    def __init__(
        self,
        local: LocalPolicies,
        access: Access,
        limits: BodyLimits,
        prompts: Prompts | None = None,
        recording: Recording | None = None,
        names: ModelNames | None = None,
    ) -> None:
        """Answer chat requests with opened policies.

        Args:
            access: checks tokens.
            limits: limits of bodies.
            prompts: edited prompts to send calls with.
            recording: where calls are recorded; None if they are not.
            names: the model names that are answered; by default one for each role.
        """
        self.names = names or name_models(local, prompts=prompts is not None)
        # A call's role is the role of its model name, or the name itself if the default policy answers.
        self.local = replace(local, served=self.names.served, others=self.names.default)
        self.access = access
        self.limits = limits
        self.room = room_for(limits)
        """Bounds the memory of all bodies that arrive at the same time."""
        self.responder = _Responder(self.local)
        self.in_flight = 0
        self.counts: Counter[str] = Counter()
        self.not_enforced: Counter[str] = Counter()
        self.unedited: Counter[str] = Counter()
        """Requests that do not have the texts that the prompts edit, by reason."""
        self._prompts = prompts
        self._recording = recording
        self._unrecorded_episode = self._open_episode(Recording(Nowhere()))
        """The episode of all calls if they are not recorded."""

    def _open_episode(self, recording: Recording, key: str = "") -> LiveEpisode:
        """An episode for calls to this server. They have no task of their own, so all share a task named `serve`."""
        task = Task(id="serve", input=None)
        return LiveEpisode(
            recording.sink,
            task,
            workflow="serve",
            prompts=self._prompts,
            redactors=recording.redactors,
            app=recording.app,
            key=key,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request as an ASGI application. A refused request is counted by its status."""
        self.in_flight += 1
        try:
            await self._serve(scope, receive, send)
        except RequestError as error:
            self.counts[f"refused_{error.status}"] += 1
            await refusal(error)(scope, receive, send)
        finally:
            self.in_flight -= 1

    def find(self, model: str) -> ServedModel:
        """The policy of a model name. Raises RequestError (404) with the known names and the remedy."""
        served = self.names.find(model)
        if served is None:
            raise RequestError(404, self.names.fault(model), param="model", code="model_not_found")
        return served

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request through the responder. A call without an answer is recorded as failed."""
        body = await read_json(scope, receive, self.access, dict[str, Any], self.limits, self.room)
        try:
            request = msgspec.convert(body, ChatRequest)
        except msgspec.ValidationError as error:
            raise invalid_value(error) from None
        # The responder honours some fields of other servers and refuses others.
        others = {name: value for name, value in body.items() if name not in ChatRequest.__struct_fields__}
        call = self._start_call(request, others, checked_key(header(scope, b"x-cotune-key")))
        try:
            content, content_type = await unless_gone(receive, functools.partial(self._answer, request, call))
        except ClientGone:
            self.counts["disconnected"] += 1
            self._record_failure(call, "cancelled", "the client went away")
            return
        except RequestError as error:
            is_timeout = error.status == 504
            self._record_failure(call, "timeout" if is_timeout else "error", error.message)
            raise
        except BaseException as error:
            self._record_failure(call, "cancelled", type(error).__name__)
            raise
        self.counts["ok"] += 1
        policy = self.find(request.model).policy
        headers = {"content-type": content_type, "x-cotune-policy": quote(str(policy), safe="@ ")}
        if request.stream:
            headers["cache-control"] = "no-cache"
        if self._recording is not None:
            headers |= {"x-cotune-episode": call.episode.id, "x-cotune-call": call.id}
        await Response(content, headers=headers)(scope, receive, send)

    def _start_call(self, request: ChatRequest, others: Mapping[str, Any], key: str) -> LiveCall:
        """Start the call of a request, with edited prompts. `others` are the fields of the body that `request` lacks.

        If requests are recorded, the call is in an episode of its own, which the application names by `key`.
        """
        # An alias counts as its role, so the role's prompts are edited.
        role = self.find(request.model).name or request.model
        body = {**others, **msgspec.structs.asdict(request)}
        caller = CallerContext(role, integration="serve", given=True)
        if self._recording is not None:
            call = self._open_episode(self._recording, key).start(caller, body)
        else:
            # `start` would keep each call in the episode, and this one lasts as long as the server.
            call = LiveCall(self._unrecorded_episode, caller, step=0, turn=0, body=body)
            self._unrecorded_episode.edit(call, body)
        if call.unedited:
            self.unedited[call.unedited] += 1
        return call

    def _record_failure(self, call: LiveCall, status: CallStatus, error: str) -> None:
        if self._recording is not None:
            call.fail(status, error)
            call.episode.end("cancelled" if status == "cancelled" else "error", error=error)

    async def _answer(self, request: ChatRequest, call: LiveCall) -> tuple[bytes, str]:
        """The body of the response to a request, and its content type. Errors of the responder become RequestErrors."""
        body = msgspec.structs.asdict(request)
        chat = self.responder.chat_of(request.model)
        # The responder logs these options; here they are counted for /health.
        self.not_enforced.update(name for name in template_options(body) if not chat.reads(name))
        self.not_enforced.update(unknown_fields(call.params))
        try:
            # In a list, so that `_encode_answer` can take the last reference to it.
            answer_box = [await self.responder.respond(call)]
        except SampleTimeout as error:
            raise RequestError(504, str(error), code="timeout") from None
        except RequestRefused as error:
            raise RequestError(400, str(error), code="invalid_value") from None
        except SamplerError as error:
            logger.error("The sampler failed: %s", error)
            raise RequestError(500, str(error), code="sampler_error") from None
        except RecursionError:
            raise RequestError(400, "The body is nested too deeply.", code="invalid_value") from None
        return await asyncio.to_thread(_encode_answer, call, body, answer_box, self._recording is not None)


def _encode_answer(
    call: LiveCall, body: Mapping[str, Any], answer_box: list[Answer | None], record: bool
) -> tuple[bytes, str]:
    """Body and content type of the response to a request; with `record`, the call is recorded as well.

    The answer comes in a list, from which it is removed: this thread then holds the last reference, and freeing a long
    answer, which takes a while, does not block the event loop.
    """
    answer = answer_box.pop()
    assert answer is not None, "find leaves no model to a provider"
    content = CHAT.content(call, answer, body)
    if record:
        call.finish(answer)
        call.episode.end("ok")
    return content


class _Responder(LocalResponder):
    """Answers a request that cannot be rendered with a 400 that names the field."""

    async def prepare(self, call: LiveCall) -> tuple[list[int], SamplingParams]:
        """The prompt and the sampling parameters of a call. Errors become RequestErrors that name the wrong
        parameter.
        """
        try:
            return await super().prepare(call)
        except PromptTooLong as error:
            raise RequestError(400, error.cause, param="messages", code="context_length_exceeded") from None
        except RequestRefused:
            raise
        except SamplerError as error:
            raise RequestError(400, str(error), param="messages", code="invalid_value") from None
