"""Which episodes are asked for, as conditions of SQL on the table of episodes."""

from __future__ import annotations

from typing import Any

import msgspec

COUNTED = "status NOT IN ('cancelled', 'abandoned')"
"""The condition of SQL that an episode counts in figures: it came to an end, and no rollback has taken it back."""


class EpisodeFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are empty or None do not matter. `status` may be `counted`, for all but cancelled and abandoned
    episodes. `role` had a call in the episode; `low` and `high` bound the sum of its rewards; `step` is its number as
    people see it, from 1; ids are below `before`."""

    phase: str = ""
    status: str = ""
    role: str = ""
    task: str = ""
    step: int | None = None
    low: float | None = None
    high: float | None = None
    before: str = ""

    def where(self) -> tuple[str, list[Any]]:
        """The WHERE clause, empty where all fit, and its parameters in order."""
        rewards = "(SELECT sum(value) FROM rewards WHERE target = episodes.id)"
        conditions = {
            "phase = ?": self.phase,
            f"({COUNTED}) = (? = 'counted')" if self.status == "counted" else "status = ?": self.status,
            "task = ?": self.task,
            "training_step = ? - 1": self.step,
            "EXISTS (SELECT 1 FROM calls WHERE calls.episode = episodes.id AND role = ?)": self.role,
            f"{rewards} >= ?": self.low,
            f"{rewards} <= ?": self.high,
            "id < ?": self.before,
        }
        asked = {condition: value for condition, value in conditions.items() if value not in ("", None)}
        return f"WHERE {' AND '.join(asked)}" if asked else "", list(asked.values())


EVERYTHING = EpisodeFilters()
"""All episodes."""
