"""Checks of the settings of recipes that learn from records."""

from __future__ import annotations

from cotune.algorithms.from_records import FROM_RECORDS, PAIRED
from cotune.config.learner import LearnerSettings
from cotune.config.records import RecordsConfig
from cotune.errors import ConfigError
from cotune.storage.episode_filters import moment
from cotune.storage.open_store import without_password


def check_records(recipe: str | None, records: RecordsConfig, learner: LearnerSettings) -> None:
    """Check the table [records] against the recipe: only recipes that learn from records use it, and they need some of
    its settings. Raises ConfigError.
    """
    if (shown_path := without_password(records.path)) != records.path:
        remedy = "Leave it out, and set PGPASSWORD or write ~/.pgpass."
        raise ConfigError("records.path", shown_path, "has a password, which run.json would keep", remedy)
    if records.since not in ("", "last"):
        moment("records.since", records.since)
    if recipe not in FROM_RECORDS:
        if records.path:
            names = " or ".join(FROM_RECORDS)
            raise ConfigError(
                "recipe", recipe, "does not learn from records", f"Use --recipe {names}, or leave out --records."
            )
        return
    if not records.path:
        raise ConfigError(
            "records", "", f"is missing: recipe {recipe} needs a run folder or records file", "Pass --records."
        )
    if recipe != "dpo" and records.labels:
        raise ConfigError("records.labels", records.labels, f"cannot be used with recipe {recipe}", "Use dpo.")
    if recipe not in PAIRED:
        return
    if learner.mini_batch < 2:
        raise ConfigError("learner.mini_batch", learner.mini_batch, "must be 2 or more: a pair has two rows")
    if records.min_reward is not None:
        fault = f"cannot be used with recipe {recipe}, which takes the best and worst answers"
        raise ConfigError("records.min_reward", records.min_reward, fault)
