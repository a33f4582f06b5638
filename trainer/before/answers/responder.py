"""Answers an application's calls without training's models: scored and recorded as in training."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from cotune.errors import WorkflowError
from cotune.recording.recorder import LiveCall, Responder
from cotune.records.answers import Answer
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplingParams, TokenBytes, TopTokens
from cotune.sampling.responder import PolicyResponder

Message = Mapping[str, Any]
ENDLESS = "on one task and did not stop"
"""Part of the error of an episode that makes more calls than it may."""
STOPPED_AFTER = 4
"""An application that swallows the refusal of further calls is stopped after this many times the limit."""


@dataclass(eq=False, kw_only=True)
class CheckResponder:
    """Answers the calls of one episode. Plan, scorers and the choice of a candidate work as in training.

    `answers(call)` returns a function from the index of a candidate to its message. Without it the `model` answers, or
    the application's own provider if there is none. `limit` bounds the calls: beyond it the episode fails. `training`
    are options of `PolicyResponder`, as training sets them.
    """

    answers: Callable[[LiveCall], Callable[[int], Message]] | None = None
    model: Responder | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    provider_roles: Collection[str] = ()
    limit: int = 64
    meeting: threading.Barrier | None = None
    """Here the first call waits for the first call of another run, at most a second, so that both overlap."""
    calls: int = field(default=0, init=False)
    """Calls so far, refused ones too."""

    async def respond(self, call: LiveCall) -> Answer | None:
        """Answer a call, or raise WorkflowError beyond the limit of calls."""
        self.calls += 1
        if self.calls > STOPPED_AFTER * self.limit:
            raise asyncio.CancelledError(f"the application made {self.limit} calls {ENDLESS}")
        if self.calls > self.limit:
            raise WorkflowError(
                f"The application made {self.limit} calls {ENDLESS}; the last one by {call.role!r}.",
                "Raise --calls if an episode may need more.",
            )
        # Wait for the other run, if both are to overlap: in a thread, because it may be in another event loop.
        if self.meeting is not None and self.calls == 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                await asyncio.to_thread(self.meeting.wait, 1.0)

        # Without drawn or recorded answers, a model answers. None lets the application's own provider answer.
        if self.answers is None:
            return None if self.model is None else await self.model.respond(call)

        # Otherwise record the given message as a policy's answer, scored as in training.
        is_provider_role = call.role in self.provider_roles
        if is_provider_role:
            call.unsupported_reason = ""  # The provider may support features that policies do not.
        sampler = MessageSampler(self.answers(call))
        policies = {call.role: PolicyRef("drawn")}
        options = {} if is_provider_role else self.training
        inner = PolicyResponder(cast(Sampler, sampler), sampler, policies, **options)
        answer = await inner.respond(call)
        assert answer is not None
        if is_provider_role:
            # An answer of a provider has no policy and no token ids.
            return msgspec.structs.replace(answer, policy=None, prompt_ids=())
        return answer


class MessageSampler:
    """Sampler and chat format of one call: the token ids of a candidate are the bytes of its message."""

    image_tokens: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()

    def __init__(self, message: Callable[[int], Message]) -> None:
        self.message = message

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, **_: Any) -> list[int]:
        return list(msgspec.json.encode([messages, tools], enc_hook=str))

    def images(self, messages: Sequence[Message]) -> tuple[bytes, ...]:
        return ()

    def reads(self, option: str) -> bool:
        return True

    def grammar(
        self, asked: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, prompt: Sequence[int]
    ) -> str:
        return ""

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Return `n` completions without a model: the UTF-8 bytes of each message as JSON stand for its token ids, and
        every token has the log-probability -1."""
        completions = []
        for index in range(n):
            ids = tuple(msgspec.json.encode(self.message(index), enc_hook=str))
            logprobs = (-1.0,) * len(ids)
            top_logprobs: tuple[TopTokens, ...] = ()
            if params.top_logprobs:
                top_logprobs = tuple(((id, -1.0),) for id in ids)  # the drawn token is the only likely one
            completions.append(Completion(ids, logprobs, "stop", top_logprobs))
        return completions

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        return ""

    def token_bytes(self, token_ids: Sequence[int]) -> list[TokenBytes]:
        return [TokenBytes(bytes([id])) for id in token_ids]

    def parse(self, token_ids: Sequence[int], stop: Sequence[str] = (), **_: Any) -> tuple[str, dict[str, Any], str]:
        message = msgspec.json.decode(bytes(token_ids))
        return message.get("content") or "", message, "tool_calls" if message.get("tool_calls") else "stop"
