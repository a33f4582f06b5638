"""Settings of the guard against a collapse."""

from __future__ import annotations

from typing import Literal

import msgspec

from cotune.errors import check_bounds


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[guard] Ends a run whose training has collapsed."""

    action: Literal["off", "stop", "roll_back"] = "off"
    """stop: end the run | roll_back: end it and go back to the checkpoint of its best window."""
    window: int = 5
    """Steps in a window; their mean is compared."""
    min_entropy: float | None = None
    """A role has collapsed if its entropy, in nats per token, is below this."""
    max_gap: float | None = None
    """A role has collapsed if sampler and learner disagree on its tokens by more than this, in nats."""

    def __post_init__(self) -> None:
        check_bounds(self, "window", least=2, table="guard.")
