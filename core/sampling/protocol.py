"""What generates tokens: token ids in, token ids out. Templates and parsers stand in front of it (`ChatFormat`)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.errors import SampleTimeout, SyncError
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef

Weights = Mapping[str, npt.NDArray[Any]]


def fingerprint(weights: Weights) -> str:
    """SHA-256 over names, shapes and fp32 bytes in name order: equal for learner, sampler and export."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name], dtype=np.float32)
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. `temperature` 0 is greedy. `seed` fixes the candidates of one request.

    `stop` strings end a candidate and are not part of its text; `timeout` is in seconds. `grammar` (Lark, "" for none)
    says which tokens may come next. Logits are changed in this order: grammar, `logit_bias` (pairs of token id and
    what is added), `repetition_penalty` (tokens of prompt and reply), `frequency_penalty` and `presence_penalty`
    (tokens of the reply), temperature, `min_p`, `top_k`, `top_p`. `images` are the encoded bytes (PNG, JPEG, ...) of
    what the image tokens of the prompt stand for, in order. `top_logprobs` is how many of the most likely tokens are
    told at each place. `stop_token_ids` end a candidate like the model's own end tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    timeout: float | None = None
    images: tuple[bytes, ...] = ()
    top_logprobs: int = 0


MOST_TOP_LOGPROBS = 20
"""The largest `top_logprobs`, as in OpenAI's interface."""

UNSHAPED: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What training sets whatever an application asks: these bend the distribution where the learner does not follow.
A grammar and `logit_bias` it does follow."""


def at_temperature(temperature: float | None) -> dict[str, float] | None:
    """Settings that replace the application's own: the temperature and all others that shape the distribution; None
    without a temperature, where its own hold."""
    return None if temperature is None else {"temperature": temperature, **UNSHAPED}


NEVER = -100.0
"""The bias of a token that is never to be drawn, as in OpenAI's interface."""


TopTokens = tuple[tuple[int, float], ...]
"""Token ids and log-probabilities of one place, the likeliest first."""


class Completion(msgspec.Struct, frozen=True):
    """One sampled completion. `token_ids` includes the end token when the model ended by itself.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution that was sampled from
    (temperature and truncation applied), in nats. `finish_reason` is "stop" or "length". `top[i]` are the tokens most
    likely at place i under the same distribution, with their log-probabilities, the likeliest first: as many as were
    asked for, or all that could be drawn. It is empty where none were.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    top: tuple[TopTokens, ...] = ()


class SamplerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a sampler that callers check before work starts."""

    name: str
    max_model_len: int
    served: Mapping[str, str] = {}
    """Fingerprint of what is served, by `str(PolicyRef)`."""
    counters: Mapping[str, int] = {}
    """What the sampler has counted since it was opened, by reason; empty where it counts nothing."""


@asynccontextmanager
async def in_time(policy: PolicyRef, params: SamplingParams) -> AsyncIterator[None]:
    """The time that a request may take. Raises SampleTimeout when what is inside takes longer."""
    try:
        async with asyncio.timeout(params.timeout):
            yield
    except TimeoutError:
        raise SampleTimeout(
            f"{policy} did not answer within {params.timeout} s.",
            "Raise the time-out (half of episode_timeout in training), lower max_tokens, or run fewer at once.",
        ) from None


class Sampler(Protocol):
    """A generator of candidates. Every method may be awaited from any event loop or thread's loop, unless the class
    says that it belongs to the loop that it was opened in.

    Cancelling the awaiting task cancels the request inside the engine.
    """

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """Draw `n` candidates from one prefill.

        Raises RequestRefused when the request itself cannot be served, SampleTimeout, and SamplerError for the rest.
        """
        ...

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Serve `policy` with these weights; return the `fingerprint` computed from what arrived.

        LoRA weights (`lora` given) are keyed by PEFT state-dict names, full weights (`lora` None) by model
        parameter names. Several versions are served at once until retired. Version 0 of a policy that was never
        published is the base model.
        """
        ...

    async def retire(self, policy: PolicyRef) -> None:
        """Stop serving a version once its running requests have drained."""
        ...

    async def info(self) -> SamplerInfo: ...

    async def aclose(self) -> None:
        """Stop the engine; pending requests fail with SamplerError. Safe to call twice."""
        ...


async def publish_verified(
    sampler: Sampler, policy: PolicyRef, weights: Weights, lora: LoraSpec | None, sent: str
) -> None:
    """Publish weights whose fingerprint is `sent`. Raises SyncError when they arrive altered."""
    arrived = await sampler.publish(policy, weights, lora)
    if arrived != sent:
        raise SyncError(
            f"Policy {policy} arrived with fingerprint {arrived}; {sent} was sent.",
            "Check the sampler's log: weights were lost or altered on the way.",
        )


class SleepingSampler(Sampler, Protocol):
    """A sampler that shares an accelerator with a learner, and gives it up while it sleeps."""

    async def sleep(self, keep_weights: bool = False) -> None:
        """Finish what runs, then free the accelerator; what is asked meanwhile waits for `wake`. Safe to call twice.

        With `keep_weights` the weights stay where they are, and only the cache is freed: both ways take milliseconds. A
        second call without it frees the weights too.
        """
        ...

    async def wake(self) -> None:
        """Go on. Raises SamplerError when the weights are not those that went to sleep; then nothing is served."""
        ...


class TokenBytes(NamedTuple):
    """What a token writes. A `mark` stands outside of text: it ends a turn, or opens what is no content."""

    raw: bytes
    mark: bool = False


class ChatFormat(Protocol):
    """Renders chat requests to token ids and parses sampled ids back; one for all samplers."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        earlier: Sequence[bytes] = (),
        most: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the prompt, generation prompt included. Raises SamplerError when it cannot be rendered, and
        PromptTooLong when it has more than `most` tokens.

        `earlier` are token paths of the same role, packed (`ids.pack_ids`); the longest one that the prompt extends is
        kept id for id.
        `options` are variables for the template (`enable_thinking`, ...).
        """
        ...

    def images(self, messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
        """The encoded images of messages, in order. Raises RequestRefused where there are some and the model sees none,
        or one does not come with its bytes."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens with which the model ends a reply."""
        ...

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The stop string that ended a reply; empty where none did."""
        ...

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images in a prompt."""
        ...

    def reads(self, option: str) -> bool:
        """Whether the template knows a variable of this name."""
        ...

    def grammar(
        self, asked: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, prompt: Sequence[int]
    ) -> str:
        """The grammar of the replies to `prompt` that a request in OpenAI form allows, by `response_format`, tools,
        `tool_choice` and `parallel_tool_calls`. Raises RequestRefused for a form that cannot be enforced.
        """
        ...

    def token_bytes(self, token_ids: Sequence[int]) -> list[TokenBytes]:
        """What each token writes, one by one: several may make one character."""
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, dict[str, Any], str]:
        """Return (text, assistant message in OpenAI form, finish reason: "stop", "tool_calls" or "malformed").

        `prompt` is what the reply goes on from, as it may open the reasoning; `tools` are those offered.
        A tool call that cannot be read stays in the text: "malformed" says that there is one.
        """
        ...


@dataclass(frozen=True)
class ChatFormats:
    """The chat format of each policy, which its base model has: that of `own`, the run's model, or by the policy's
    name one of `others`."""

    own: ChatFormat
    others: Mapping[str, ChatFormat] = field(default_factory=dict)

    def of(self, policy: str) -> ChatFormat:
        return self.others.get(policy, self.own)
