"""Settings of the router over several engines, and what it reports about itself."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.errors import ConfigError


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All times are in seconds."""

    min_healthy: int = 1
    """Requests wait while fewer engines than this are healthy."""
    max_in_flight: int = 64
    """Requests that one engine works on at once; others wait in order."""
    max_attempts: int = 3
    """Engines that one request is given to before it fails."""
    vocabulary: int | None = None
    """Number of token ids; ids outside it are garbage. None: not checked."""

    request_timeout: float = 600.0
    """How long one engine may work on one request; then it is given to another."""
    publish_timeout: float = 600.0
    """How long one engine may take to serve a new version."""
    start_timeout: float = 1200.0
    """How long an engine may take to start."""
    close_timeout: float = 60.0
    """How long a failed engine may take to end before a new one is started in its place."""

    health_every: float = 10.0
    """Pause between two health checks of an engine."""
    health_timeout: float = 30.0
    """How long an engine may take to answer a health check."""
    outcomes: int = 20
    """How many of its last requests an engine is judged by."""
    min_outcomes: int = 3
    """With fewer finished requests it is not judged."""
    max_fault_share: float = 0.5
    """Share of failed requests (garbage, errors, time-outs) from which an engine is restarted."""
    slow_factor: float = 10.0
    """An engine is slow when it takes this many times longer per token than the others' median."""
    slow_seconds: float = 5.0
    """Engines whose median request is shorter than this are never called slow."""

    max_restarts: int = 5
    """Restarts of one engine, failed starts included; then it is given up."""
    forgive_after: float = 3600.0
    """After this time in health an engine's restarts are counted from 0 again."""
    backoff: float = 1.0
    """Pause before the first restart; doubled with each further one."""
    max_backoff: float = 60.0

    block_tokens: int = 16
    """Prefixes are compared in blocks of this many tokens."""
    prefix_blocks: int = 1 << 16
    """How many blocks are remembered."""
    slack: float = 4.0
    """How many requests like the one to place an engine may be ahead of the least loaded one, for a known prefix."""

    def check(self, engines: int) -> None:
        """Raises ConfigError for what cannot be, with this number of engines."""
        if engines < 1:
            raise ConfigError("engines", engines, "at least 1")
        if not 1 <= self.min_healthy <= engines:
            raise ConfigError("min_healthy", self.min_healthy, f"1 to {engines}, the number of engines")
        counts = ("max_in_flight", "max_attempts", "outcomes", "min_outcomes", "block_tokens", "prefix_blocks")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        times = [name for name in self.__struct_fields__ if name.endswith(("_timeout", "_every"))]
        for name in (*times, "max_fault_share", "slow_factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "above 0")
        for name in ("max_restarts", "backoff", "max_backoff", "slack", "slow_seconds", "forgive_after"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "at least 0")


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the router sees it."""

    state: str
    """starting, healthy, failed (to be restarted), lost (restarts used up) or closed."""
    running: int
    """Requests that it works on."""
    answered: int
    """Requests that it has answered well, over all its restarts."""
    restarts: int
    """Restarts so far, failed starts included."""
    fault: str | None
    """Why it was taken out the last time."""


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """The router's counters by reason, its engines by name, and what happened last, oldest first."""

    counters: Mapping[str, int]
    replicas: Mapping[str, ReplicaStats]
    waiting: int
    """Requests that wait for an engine."""
    events: tuple[str, ...]


COUNTERS = (
    "requests",  # all that were asked for
    "answered",
    "refused",  # a healthy engine, or the router, would not serve the request itself
    "failed",  # ended with SamplerError after all attempts, or because too few engines are left
    "late",  # past the caller's own time-out
    "cancelled",  # by the caller
    "retried",  # attempts beyond a request's first
    "queued",  # had to wait because all engines were full
    "waited",  # had to wait because too few engines were healthy
    "died",  # attempts that ended because the engine was taken out
    "garbage",  # answers that are none
    "timeouts",  # attempts past the router's request_timeout
    "errors",  # attempts that an engine answered with an error of its own
    "slow",  # engines taken out because they were slow
    "unhealthy",  # engines taken out by a health check
    "faulty",  # engines taken out because too many of their requests failed
    "restarts",  # starts of a new engine in a failed one's place
    "failed_starts",
    "lost",  # engines given up
)
