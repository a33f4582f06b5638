"""What goes between the in-process sampler and its engine, and how it travels to another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cotune.policies import LoraSpec
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams


class ModelSource(NamedTuple):
    """What the engine loads and its limits; see `TransformersSampler.open`. `model` may be a loaded model."""

    model: Any
    device: str | None
    dtype: str | None
    threads: int
    max_batch_rows: int
    max_batch_tokens: int
    tokenizer: Any
    end_token_ids: tuple[int, ...] | None


class SampleRequest(msgspec.Struct, frozen=True, tag="sample"):
    """Ask for `n` candidates; answered by Completions or Failure."""

    id: int
    prompt: tuple[int, ...]
    n: int
    params: SamplingParams
    policy: PolicyRef


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Drop a Sample; not answered."""

    id: int


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Serve a policy version; answered by its fingerprint. `weights` are arrays by name."""

    id: int
    policy: PolicyRef
    lora: LoraSpec | None
    weights: Any


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """Serve no new requests of a version and free it when the running ones have ended."""

    id: int
    policy: PolicyRef


class Info(msgspec.Struct, frozen=True, tag="info"):
    """Ask for SamplerInfo."""

    id: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Stop; pending requests are failed by whoever sent them."""


Numbered = SampleRequest | Cancel | Publish | Retire | Info
Command = Numbered | Close


class Completions(msgspec.Struct, frozen=True, tag="completions"):
    """Answer to Sample."""

    id: int
    value: list[Completion]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Answer to any other command."""

    id: int
    value: str | SamplerInfo | None


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The command is refused. Id 0 says that the engine itself is gone."""

    id: int
    cause: str
    remedy: str


Answer = Completions | Done | Failure

_COMMANDS = msgspec.msgpack.Decoder(list[Command])
_REPLIES = msgspec.msgpack.Decoder(list[Answer])


def encode(messages: Sequence[Command] | Sequence[Answer]) -> bytes:
    return msgspec.msgpack.encode(messages)


def decode_commands(data: bytes) -> list[Command]:
    return _COMMANDS.decode(data)


def decode_replies(data: bytes) -> list[Answer]:
    return _REPLIES.decode(data)
