"""Samplers generate tokens: token ids in, token ids out. Chat templates and parsers are separate (`ChatFormat`)."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.errors import SampleTimeout, SyncError
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.runtime.loop_watch import paused_while_blocked

Weights = Mapping[str, npt.NDArray[Any]]
Shape = tuple[int, ...]


class RemoteWeights(Mapping[str, npt.NDArray[Any]]):
    """Weights that are in another process, with the facts that are known of them here. Reading an array fetches all.

    `fingerprint` and `norm` were computed in the other process. `shapes` has the shape of each tensor by name.
    """

    def __init__(self, fingerprint: str, norm: float, shapes: Mapping[str, Shape]) -> None:
        self.fingerprint = fingerprint
        self.norm = norm
        self.shapes = shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Fingerprint:
    """Computes the `fingerprint` of weights from one tensor after the other. Add them in the order of their names."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Add the next tensor."""
        array = np.ascontiguousarray(array, dtype=np.float32)
        self._digest.update(f"{name}{array.shape}".encode())
        self._digest.update(array.data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def fingerprint(weights: Weights) -> str:
    """SHA-256 of names, shapes and float32 bytes, in the order of names. It is the same in learner, sampler and
    export."""
    if isinstance(weights, RemoteWeights):
        return weights.fingerprint
    digest = Fingerprint()
    for name in sorted(weights):
        digest.add(name, weights[name])
    return digest.hexdigest()


def weights_norm(weights: Weights) -> float:
    """L2 norm over all tensors, summed in double precision."""
    if isinstance(weights, RemoteWeights):
        return weights.norm
    return math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in weights.values()))


def weight_shapes(weights: Weights) -> Mapping[str, Shape]:
    """The shape of each tensor by name."""
    if isinstance(weights, RemoteWeights):
        return weights.shapes
    return {name: tuple(array.shape) for name, array in weights.items()}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of sampling. `temperature` 0 is greedy. `seed` fixes the candidates of one request.

    `stop` strings end a candidate and are not part of its text; `timeout` is in seconds. `grammar` (Lark, "" for none)
    restricts the tokens that may come next. Logits are changed in this order: grammar, `logit_bias` (pairs of a token
    id and the number that is added), `repetition_penalty` (tokens of prompt and reply), `frequency_penalty` and
    `presence_penalty` (tokens of the reply), temperature, `min_p`, `top_k`, `top_p`. `images` are the encoded bytes
    (PNG, JPEG, ...) of the images for the image tokens of the prompt, in order. `top_logprobs` is the number of most
    likely tokens to report at each place. `stop_token_ids` end a candidate like the model's own end tokens.
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
"""Values that training sets instead of the application's: the learner does not model these changes of the distribution.
It does model a grammar and `logit_bias`."""


def at_temperature(temperature: float | None) -> dict[str, float] | None:
    """Settings that replace the application's: the temperature and all others that shape the distribution. Without a
    temperature, None: the application's settings are used."""
    return None if temperature is None else {"temperature": temperature, **UNSHAPED}


NEVER = -100.0
"""The bias of a token that must never be drawn, as in OpenAI's interface."""


TopTokens = tuple[tuple[int, float], ...]
"""Token ids and log-probabilities at one place, the likeliest first."""


class Completion(msgspec.Struct, frozen=True):
    """One sampled completion. `token_ids` includes the end token when the model ended by itself.

    `logprobs[i]` is the log-probability of `token_ids[i]`, in nats, under the distribution that was sampled from (with
    temperature and truncation). `finish_reason` is "stop" or "length". `top[i]` are the most likely tokens at place i
    under the same distribution, with their log-probabilities, the likeliest first: the requested number, or all tokens
    that could be drawn. `top` is empty if none were requested.
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
    """Fingerprints of the served weights, by `str(PolicyRef)`."""
    counters: Mapping[str, int] = {}
    """Counts of the sampler since it was opened, by reason; empty if it counts nothing."""


@asynccontextmanager
async def in_time(policy: PolicyRef, params: SamplingParams) -> AsyncIterator[None]:
    """A block that samples for a request. Raises SampleTimeout if it takes longer than `params.timeout`. Time in which
    the application blocks the event loop does not count."""
    try:
        async with asyncio.timeout(params.timeout) as limit:
            with paused_while_blocked(limit):
                yield
    except TimeoutError:
        raise SampleTimeout(
            f"{policy} did not answer within {params.timeout} s.",
            "Raise the time-out (half of episode_timeout in training), lower max_tokens, or run fewer at once.",
        ) from None


class Sampler(Protocol):
    """A generator of candidates. Every method may be awaited from the event loop of any thread, unless the class
    belongs to the loop in which it was opened.

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
        """Serve `policy` with these weights, and return the `fingerprint` of the weights that arrived.

        LoRA weights (with `lora`) have the names of a PEFT state dict, full weights (`lora` None) the names of model
        parameters. Several versions are served at the same time until they are retired. Version 0 of a policy that was
        never published is the base model.
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
    """Publish weights, and compare the fingerprint of the weights that arrive with `sent`, the fingerprint of the
    weights that were sent. Raises SyncError if they differ."""
    arrived = await sampler.publish(policy, weights, lora)
    if arrived != sent:
        raise SyncError(
            f"Policy {policy} arrived with fingerprint {arrived}; {sent} was sent.",
            "Check the sampler's log: weights were lost or altered on the way.",
        )


class SleepingSampler(Sampler, Protocol):
    """A sampler that shares an accelerator with a learner, and gives it up while it sleeps."""

    async def sleep(self, keep_weights: bool = False) -> None:
        """Finish running requests, then free the accelerator. Later requests wait for `wake`. Safe to call twice.

        With `keep_weights`, only the cache is freed and the weights stay in place: sleeping and waking then take
        milliseconds. A second call without it frees the weights too.
        """
        ...

    async def wake(self) -> None:
        """Serve requests again. Raises SamplerError if the weights have changed during the sleep; then nothing is
        served."""
        ...


class TokenBytes(NamedTuple):
    """The bytes that a token writes. A `mark` is not part of the text: it ends a turn, or begins a part that is not
    content."""

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
        """The token ids of a prompt, up to the place at which the reply begins. Raises SamplerError if the chat
        template fails, and PromptTooLong if the prompt has more than `most` tokens.

        `earlier` are the packed token ids (`ids.pack_ids`) of earlier prompts of the role, with and without their
        replies. The prompt reuses the ids of the longest one that it extends. `options` are variables for the template
        (`enable_thinking`, ...).
        """
        ...

    def images(self, messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
        """The encoded images of messages, in order. Raises RequestRefused if there are images and the model cannot see
        them, or if an image does not come with its bytes."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens with which the model ends a reply."""
        ...

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The stop string that ended a reply; empty if none did."""
        ...

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images in a prompt."""
        ...

    def reads(self, option: str) -> bool:
        """Whether the template reads a variable with this name."""
        ...

    def grammar(
        self, asked: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, prompt: Sequence[int]
    ) -> str:
        """The grammar for the replies to `prompt` that a request in OpenAI form allows with its `response_format`,
        tools, `tool_choice` and `parallel_tool_calls`. Raises RequestRefused for a form that cannot be enforced."""
        ...

    def token_bytes(self, token_ids: Sequence[int]) -> list[TokenBytes]:
        """The bytes that each token writes. A character may consist of several tokens."""
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, dict[str, Any], str]:
        """Turn the tokens of a reply into (text, assistant message in OpenAI form, finish reason).

        The finish reason is "stop", "tool_calls" or "malformed". A tool call that cannot be read stays in the text;
        then it is "malformed". `stop` are the stop sequences, and `tools` the tools that were offered. `prompt` are the
        tokens before the reply, because the prompt may have begun the reasoning.
        """
        ...


@dataclass(frozen=True)
class ChatFormats:
    """The chat format of each policy: `own`, the format of the run's model, or for a policy with another base model the
    format in `others`, by the name of the policy."""

    own: ChatFormat
    others: Mapping[str, ChatFormat] = field(default_factory=dict)

    def of(self, policy: str) -> ChatFormat:
        return self.others.get(policy, self.own)
