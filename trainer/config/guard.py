"""Settings of the guard against a collapse."""

from __future__ import annotations

from typing import Literal

import msgspec

from cotune.errors import ConfigError


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[guard] What ends a run that has broken down."""

    action: Literal["off", "stop", "roll_back"] = "off"
    """stop: end the run | roll_back: end it, and let its newest checkpoint be that of its best time."""
    window: int = 5
    """Steps whose mean is looked at."""
    reward_drop: float = 0.5
    """Collapsed is a reward that has lost more than this share of what the run had gained, or of half its best, beyond
    noise."""
    min_entropy: float | None = None
    """Collapsed is a role whose entropy, in nats per token, is below."""
    max_gap: float | None = None
    """Collapsed is a role on whose tokens sampler and learner disagree by more, in nats."""

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ConfigError("guard.window", self.window, "2 steps or more")
        if not self.reward_drop > 0:
            raise ConfigError("guard.reward_drop", self.reward_drop, "a number above 0")
