"""Checks of the settings of a learner, and how it trains each policy. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError

LORA_LR = 5e-6
FULL_LR = 1e-6


class PolicyTraining(NamedTuple):
    """How a learner trains one policy: its rate is that of `settings`."""

    settings: LearnerSettings
    loss: LossSpec


def check_one_process(settings: LearnerSettings, on_ray: bool, kinds: Collection[str]) -> None:
    """Raises ConfigError for what bitsandbytes does, where weights are divided (`on_ray`) or all of them trained."""
    for field, usual in (("optimizer", "adamw"), ("quantize", "none")):
        value = getattr(settings, field)
        if value != usual and on_ray:
            raise ConfigError(
                f"learner.{field}", value, f"cannot be used on a cluster, which divides the weights: set it to {usual}"
            )
    if settings.quantize != "none" and "full" in kinds:
        raise ConfigError(
            "learner.quantize", settings.quantize, "cannot be used if all weights are trained", "Train adapters."
        )


def check_losses(*losses: LossSpec) -> None:
    """Raises ConfigError for a loss that lacks a number."""
    if any(loss.aggregation == "constant" and loss.constant_length is None for loss in losses):
        raise ConfigError("loss.constant_length", None, "is missing: it is the run's response limit, in tokens")
