"""Settings of the recipes that learn from records, and of distillation from a teacher."""

from __future__ import annotations

import math

import msgspec

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.errors import ConfigError
from cotune.storage.episode_filters import moment
from cotune.storage.open_store import without_password
from cotune.storage.run_config import RunDistill, RunRecords
from cotune.trainer.config.learner import LearnerSettings


class RecordsConfig(RunRecords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[records] Recorded answers that the recipes sft and dpo learn from."""

    labels: str = ""
    """Recipe dpo: JSON lines with people's scores of candidates, such as a run's notes.jsonl, which cotune view writes.
    They stand in for rewards; candidates without a score are left out."""
    min_reward: float | None = None
    """Recipe sft: least sum of an answer's own rewards, or of its episode's where it has none."""
    since: str = ""
    """Learn only from what came later: a time ago (7d), a day (2026-11-30), or last: new episodes and newly rewarded
    ones since the last run in the same folder of runs that learned from these records."""
    held_out: float = 0.1
    """Share of the tasks that are held out, to measure the loss on; 0 for none."""

    def __post_init__(self) -> None:
        if (shown := without_password(self.path)) != self.path:
            remedy = "Leave it out, and set PGPASSWORD or write ~/.pgpass."
            raise ConfigError("records.path", shown, "has a password, which run.json would keep", remedy)
        if self.since not in ("", "last"):
            moment("records.since", self.since)
        if not 0.0 <= self.held_out < 1.0:
            raise ConfigError("records.held_out", self.held_out, "is not a share from 0 to below 1")
        if self.min_reward is not None and not math.isfinite(self.min_reward):
            raise ConfigError("records.min_reward", self.min_reward, "must be a finite number")


class DpoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[dpo] Recipe dpo: the best against the worst answer to each prompt."""

    beta: float = 0.1
    """How strongly the policy is held to the one that it starts from."""

    def __post_init__(self) -> None:
        if not 0.0 < self.beta < math.inf:
            raise ConfigError("dpo.beta", self.beta, "must be a number above 0")


class DistillConfig(RunDistill, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[distill] Recipe distill: a teacher scores what the policies sample."""


def check_records(recipe: str | None, records: RecordsConfig, learner: LearnerSettings) -> None:
    """Raises ConfigError for settings that a recipe does not have which learns from records, or which it has alone."""
    if recipe not in FROM_RECORDS:
        if records.path:
            known = " or ".join(FROM_RECORDS)
            raise ConfigError(
                "recipe", recipe, "does not learn from records", f"Use --recipe {known}, or leave out --records."
            )
        return
    if not records.path:
        raise ConfigError(
            "records", "", f"is missing: recipe {recipe} needs a run folder or records file", "Pass --records."
        )
    if recipe != "dpo":
        if records.labels:
            raise ConfigError("records.labels", records.labels, f"cannot be used with recipe {recipe}", "Use dpo.")
        return
    if learner.epochs > 1:
        raise ConfigError(
            "learner.epochs", learner.epochs, "cannot be used with recipe dpo", "Set it to 1, and raise steps."
        )
    if learner.mini_batch < 2:
        raise ConfigError("learner.mini_batch", learner.mini_batch, "must be 2 or more: a pair has two rows")
    if records.min_reward is not None:
        fault = "cannot be used with recipe dpo, which takes the best and worst answers"
        raise ConfigError("records.min_reward", records.min_reward, fault)
