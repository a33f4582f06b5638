"""Settings of how a run samples."""

from __future__ import annotations

import msgspec

from cotune.errors import ConfigError, check_bounds
from cotune.trainer.config.sizes import parse_size


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sampling] How the policies are sampled in training; overrides what the application asks for."""

    temperature: float = 1.0
    """Above 0; the distribution is never truncated in training (no top-p, no top-k)."""
    max_tokens: int = 256
    """Most new tokens per candidate where the application names no limit."""
    timeout: float = 300.0
    """Seconds until a request fails."""
    threads: int | None = None
    """CPU threads of the in-process sampler; without a value one for each core, or one in all for a model of less than
    16 million parameters, whose passes are too short to divide."""
    prefix_cache: str = ""
    """Memory in which the in-process sampler keeps keys and values of earlier prompts ("512MiB"; "0B": it keeps none);
    without a value a 32nd of the machine's, or of the GPU's."""

    def __post_init__(self) -> None:
        check_bounds(self, "temperature", "max_tokens", "timeout", "threads", table="sampling.")
        try:
            self.prefix_bytes()
        except ValueError:
            raise ConfigError(
                "sampling.prefix_cache", self.prefix_cache, "is not a size such as 512MiB, or 0B for none"
            ) from None

    def prefix_bytes(self) -> int | None:
        """`prefix_cache` in bytes, None without a value."""
        return parse_size(self.prefix_cache) if self.prefix_cache else None
