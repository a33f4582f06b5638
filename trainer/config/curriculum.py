"""Which tasks a step takes, and how many episodes of each, by how hard they are."""

from __future__ import annotations

from typing import Literal

import msgspec

from cotune.errors import ConfigError, check_bounds


class CurriculumConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[curriculum] Tasks by difficulty: as the tasks give it, or as their rewards show it."""

    by: str = ""
    """Field of each task with its difficulty, a number. Steps take the tasks of one level after another, the lowest
    number first, and then all tasks. Empty: all tasks from the start."""
    level_steps: int = 10
    """Steps that each level lasts."""
    pool: Literal["even", "adaptive"] = "even"
    """even: passes over all tasks | adaptive: tasks are drawn by the variance that the rewards of their groups are
    expected to have, p(1 - p) for rewards of 0 and 1, with an equal share for each trained role."""
    k_easy: int | None = None
    """Episodes of a task whose mean reward was 0.6 or more the last time; default: plan.k. For independent rollouts."""

    def __post_init__(self) -> None:
        check_bounds(self, "level_steps", least=1, table="curriculum.")
        if self.by and self.pool == "adaptive":
            fault = "has no effect with curriculum.pool = 'adaptive', which draws from all tasks"
            raise ConfigError("curriculum.by", self.by, fault, "Leave one of the two out.")
        if self.k_easy is not None and self.k_easy < 2:
            raise ConfigError("curriculum.k_easy", self.k_easy, "must be 2 or more: a group of one has no baseline")
