"""Messages between a sampler and the engine in its child process, and how they cross the pipe."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from cotune.errors import CotuneError, SamplerError


class Command(NamedTuple):
    """A request to the engine: a method of the `Sampler` protocol with its arguments, answered under `id`; "cancel" of
    the command `id`, and "close", which are not answered."""

    method: str
    id: int = 0
    arguments: tuple[Any, ...] = ()


CLOSE = Command("close")


class Answer(NamedTuple):
    """The result of a command, or why it is refused. Id 0: the engine itself is gone."""

    id: int
    value: Any = None
    error: CotuneError | None = None


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


def gone(reason: str) -> SamplerError:
    """The error of every request after the engine has ended."""
    return SamplerError(f"The sampler's engine is gone: {reason}.", "Read the error, then open a new sampler.")
