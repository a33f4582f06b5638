"""Settings of the guard against a collapse."""

from __future__ import annotations

from typing import Literal

import msgspec

from cotune.errors import check_bounds


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[guard] What ends a run that has broken down."""

    action: Literal["off", "stop", "roll_back"] = "off"
    """stop: end the run | roll_back: end it, and let its newest checkpoint be that of its best time."""
    window: int = 5
    """Steps whose mean is looked at."""
    min_entropy: float | None = None
    """Collapsed is a role whose entropy, in nats per token, is below."""
    max_gap: float | None = None
    """Collapsed is a role on whose tokens sampler and learner disagree by more, in nats."""

    def __post_init__(self) -> None:
        check_bounds(self, "window", least=2, table="guard.")
