"""Learner settings that force what a learner decides by itself: for tests and benchmarks that compare both ways."""

from __future__ import annotations

from typing import Literal

from cotune.config.learner import LearnerSettings


class ForcedSettings(LearnerSettings, frozen=True, kw_only=True):
    """The constants of `LearnerSettings` as fields."""

    grad_clip: float = LearnerSettings.grad_clip
    micro_batch_tokens: int | Literal["auto"] = LearnerSettings.micro_batch_tokens
    device: str = LearnerSettings.device
    threads: int | None = LearnerSettings.threads
    shared_prompts: bool = LearnerSettings.shared_prompts
    activation_checkpointing: bool | Literal["auto"] = LearnerSettings.activation_checkpointing
    tree_attention: Literal["auto", "blocks", "flex"] = LearnerSettings.tree_attention
