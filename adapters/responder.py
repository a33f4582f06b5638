"""Answers calls by policies that are open in this process, and knows the conversations that it answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cotune.adapters.conversations import Conversations, Place
from cotune.adapters.open_policies import LocalPolicies
from cotune.recording.answers import Answer
from cotune.recording.recorder import LiveCall
from cotune.runtime.bounded_cache import bytes_of
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.responder import PolicyResponder

LONG = 256 << 10
"""Bytes of messages from which on a prompt is rendered when no other such prompt is."""


class LocalResponder(PolicyResponder):
    """What `cotune serve` and `cotune.deployed` answer with: no episode, so earlier calls are found by their messages.

    Prompts are rendered in threads, so that a long one delays nobody else; very long ones one after the other.
    """

    def __init__(self, local: LocalPolicies, override: Mapping[str, Any] | None = None) -> None:
        super().__init__(
            local.sampler,
            local.chat,
            {role: served.policy for role, served in local.served.items()},
            defaults=SamplingParams(max_tokens=local.max_model_len),
            override=override,
            provider_roles=local.left_to_provider,
            others=local.others.policy if local.others else None,
            max_model_len=local.max_model_len,
        )
        self.conversations = Conversations()
        self._long = ThreadPoolExecutor(1, "cotune-long-prompts")
        self._places: dict[str, Place] = {}
        """By call that is being answered."""

    async def respond(self, call: LiveCall) -> Answer | None:
        try:
            answer = await super().respond(call)
            if answer is not None:
                reply = answer.candidates[answer.chosen]
                self.conversations.keep(self._places[call.id], answer.prompt_ids, reply.message, reply.token_ids)
            return answer
        finally:
            self._places.pop(call.id, None)

    async def prepare(self, call: LiveCall) -> tuple[list[int], SamplingParams]:
        pool = self._long if bytes_of(call.messages) > LONG else None
        self._places[call.id], prepared = await asyncio.get_running_loop().run_in_executor(pool, self._prepare, call)
        return prepared

    def _prepare(self, call: LiveCall) -> tuple[Place, tuple[list[int], SamplingParams]]:
        place = self.conversations.find(call.role, call.messages)
        return place, self.request(call, place.paths)
