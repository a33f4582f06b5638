"""Checks of the settings of a learner, and the training of each policy. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError

LORA_LR = 5e-6
FULL_LR = 1e-6


class PolicyTraining(NamedTuple):
    """How a learner trains one policy. `settings` has the learning rate of the policy."""

    settings: LearnerSettings
    loss: LossSpec


def check_one_process(settings: LearnerSettings, on_ray: bool, kinds: Collection[str]) -> None:
    """Raise ConfigError for settings that need bitsandbytes, which works only in one process (not `on_ray`) and does
    not quantize weights that are trained. `kinds` are the kinds of the policies."""
    for field, without_bitsandbytes in (("optimizer", "adamw"), ("quantize", "none")):
        value = getattr(settings, field)
        if value != without_bitsandbytes and on_ray:
            fault = f"cannot be used on a cluster, which divides the weights: set it to {without_bitsandbytes}"
            raise ConfigError(f"learner.{field}", value, fault)
    if settings.quantize != "none" and "full" in kinds:
        raise ConfigError(
            "learner.quantize", settings.quantize, "cannot be used if all weights are trained", "Train adapters."
        )


def check_losses(*losses: LossSpec) -> None:
    """Raise ConfigError for a loss with aggregation `constant` that has no constant length."""
    if any(loss.aggregation == "constant" and loss.constant_length is None for loss in losses):
        raise ConfigError("loss.constant_length", None, "is missing: it is the run's response limit, in tokens")
