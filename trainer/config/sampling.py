"""Settings of how a run samples."""

from __future__ import annotations

import msgspec

from cotune.errors import check_bounds


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sampling] How the policies are sampled in training; overrides what the application asks for."""

    temperature: float = 1.0
    """Above 0; the distribution is never truncated in training (no top-p, no top-k)."""
    max_tokens: int = 256
    """Most new tokens per candidate where the application names no limit."""
    timeout: float = 300.0
    """Seconds until a request fails."""
    repeatable: bool = False
    """The same seed gives the same run, also after an interruption: episodes run one at a time, whatever `concurrency`
    is, and the in-process sampler keeps no earlier prompts. Otherwise batches and caches depend on timing, and so do
    the last digits of log-probabilities."""

    def __post_init__(self) -> None:
        check_bounds(self, "temperature", "max_tokens", "timeout", table="sampling.")

    @property
    def prefix_bytes(self) -> int | None:
        """Memory for earlier prompts in the in-process sampler, in bytes; None for its own choice."""
        return 0 if self.repeatable else None
