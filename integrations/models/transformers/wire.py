"""What goes between the in-process sampler and its engine, and how it crosses a pipe to another process."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from cotune.errors import SamplerError

PREFIX_PART = 32
"""The memory of the machine, or of the GPU, over this is what keys and values of known prefixes may take."""


class ModelSource(NamedTuple):
    """What the engine loads and its limits; see `TransformersSampler.open`. `model` may be a loaded model."""

    model: Any
    device: str | None
    dtype: str | None
    threads: int | None
    max_batch_rows: int
    max_batch_tokens: int
    tokenizer: Any
    end_token_ids: tuple[int, ...] | None
    prefix_cache: int | None = None


class Command(NamedTuple):
    """What the engine is asked: "sample", "publish", "retire" and "info" with the arguments of the `Sampler` protocol,
    answered under `id`; "cancel" of the command `id`, and "close", which are not answered."""

    method: str
    id: int = 0
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """The result of a command, or why it is refused. Id 0: the engine itself is gone."""

    id: int
    value: Any = None
    error: SamplerError | None = None


def send(pipe: Connection, message: Any) -> None:
    """Send an object; arrays in it go as they are, without a copy."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    pipe.send((data, [len(view) for view in views]))
    for view in views:
        pipe.send_bytes(view)


def receive(pipe: Connection) -> Any:
    """What was sent by `send`. Raises EOFError, OSError where the other side is gone."""
    data, sizes = pipe.recv()
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        pipe.recv_bytes_into(buffer)
    return pickle.loads(data, buffers=buffers)
