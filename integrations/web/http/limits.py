"""How much a server takes; `max_body` and `timeout` are flags of `cotune serve`, `collect` and `gateway`."""

from __future__ import annotations

import math

import msgspec

from cotune.errors import ConfigError

MOST_MESSAGES = 10_000
"""Most messages of one request."""

ARRIVING_BODIES = 8
"""Bodies of the largest size that `cotune serve` and `cotune gateway` hold while the rest of them arrives."""


class BodyLimits(msgspec.Struct, frozen=True):
    """Bounds of a body. Raises ConfigError for one that is not a number above 0."""

    max_body: int = 16 << 20
    """Largest body in bytes, before and after decompression."""
    max_values: int = 250_000
    """Most JSON values in a body."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(name, value, "must be a number above 0", "Leave the flag out for the default.")


class Limits(BodyLimits, frozen=True):
    """Bounds of a gateway."""

    max_answer: int = 64 << 20
    """Longest answer in bytes that is recorded; a longer one passes."""
    max_inflight: int = 512
    """Most requests in flight."""
    timeout: float = 600.0
    """Seconds for one request, from its start to its end."""
