"""Messages between a sampler and the engine in its child process, and their transfer through the pipe."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from cotune.errors import CotuneError, SamplerError


class Command(NamedTuple):
    """A request to the engine: a method of the `Sampler` protocol with its arguments, whose answer has the same `id`.
    There is no answer to "cancel", which ends the command `id`, and to "close"."""

    method: str
    id: int = 0
    arguments: tuple[Any, ...] = ()


CLOSE = Command("close")


class Answer(NamedTuple):
    """The result of a command, or the error that refuses it. An answer with id 0 says that the engine has ended."""

    id: int
    value: Any = None
    error: CotuneError | None = None


def send(pipe: Connection, message: Any) -> None:
    """Send an object: first its pickle without the arrays and their sizes, then each array, without a copy."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    pipe.send((data, [len(view) for view in views]))
    for view in views:
        pipe.send_bytes(view)


def receive(pipe: Connection) -> Any:
    """Receive the next object of `send`. Raises EOFError or OSError if the other process has ended."""
    data, sizes = pipe.recv()
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        pipe.recv_bytes_into(buffer)
    return pickle.loads(data, buffers=buffers)


def engine_gone(reason: str) -> SamplerError:
    """The error of every request after the engine has ended."""
    return SamplerError(f"The sampler's engine is gone: {reason}.", "Read the error, then open a new sampler.")
