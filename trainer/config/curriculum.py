"""Which tasks a step takes, and how many episodes of each, by how hard they are."""

from __future__ import annotations

import msgspec

from cotune.errors import ConfigError, check_bounds


class CurriculumConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[curriculum] Tasks by how hard they are: said by the tasks, or found out."""

    by: str = ""
    """Field of each task that says how hard it is, a number: steps take the tasks of one level after the other, the
    lowest number first, and then all. Empty: all tasks from the start."""
    level_steps: int = 10
    """Steps that each level lasts."""
    k_easy: int | None = None
    """Episodes of a task that was easy when it was last tried; without a value: plan.k. For independent rollouts."""
    easy: float = 0.6
    """Mean reward of a task's episodes from which on it is easy."""

    def __post_init__(self) -> None:
        check_bounds(self, "level_steps", least=1, table="curriculum.")
        if self.k_easy is not None and self.k_easy < 2:
            raise ConfigError("curriculum.k_easy", self.k_easy, "must be 2 or more: a group of one has no baseline")
