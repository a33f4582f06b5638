"""The tables of recipes that learn from records, and of distillation from a teacher."""

from __future__ import annotations

import math

import msgspec

from cotune.errors import ConfigError

LEARN_FROM_RECORDS = ("sft", "dpo", "sweet_rl")
"""Recipes that learn from records, without rollouts."""


class RecordsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[records] Recorded answers that the recipes sft, dpo and sweet_rl learn from."""

    path: str = ""
    """Run folder or records file to learn from, with recipe sft, dpo or sweet_rl."""
    app: str = ""
    """Learn only from the episodes of this application."""
    labels: str = ""
    """Recipe dpo: JSON lines with people's scores of candidates, such as a run's notes.jsonl, which cotune view writes.
    They stand in for rewards; candidates without a score are left out."""
    min_reward: float | None = None
    """Recipe sft: least sum of an answer's own rewards, or of its episode's where it has none."""
    since: str = ""
    """Learn only from what came later: a time ago (7d), a day (2026-11-30), or last: new episodes and newly rewarded
    ones since the last run in the same folder of runs that learned from these records."""

    def __post_init__(self) -> None:
        if self.min_reward is not None and not math.isfinite(self.min_reward):
            raise ConfigError("records.min_reward", self.min_reward, "must be a finite number")


class DistillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[distill] Recipe distill: a teacher scores what the policies sample."""

    teacher: str = ""
    """A model with the tokenizer of the run's own: folder or Hugging Face id, loaded next to the learner, or
    the address of a vLLM server, such as http://10.0.0.5:8000. The server's key is read from VLLM_API_KEY."""
