"""What commands of the base install take; their flags are these fields."""

from __future__ import annotations

import msgspec


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How `cotune trace` records. `redact` and `roles_by` are as in a run's configuration."""

    concurrency: int = 8
    """Episodes in flight."""
    limit: int | None = None
    """Take only the first N tasks."""
    timeout: float = 600.0
    """Seconds for one episode."""
    record_tools: bool = False
    """Keep what a framework's tools return, for cotune replay to give back."""
    freeze: bool = False
    """Keep what clock, uuid and random give, for cotune replay to give again."""
    otlp: str | None = None
    """Also send each episode's spans to this OTLP/HTTP endpoint."""
    otlp_content: bool = False
    """With --otlp, send messages and task inputs too."""
    redact: str | None = None
    roles_by: str | None = None
