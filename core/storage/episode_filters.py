"""Which episodes are asked for, as conditions of SQL on the table of episodes."""

from __future__ import annotations

from typing import Any

import msgspec


class EpisodeFilters(msgspec.Struct, frozen=True, kw_only=True):
    """What is empty or None does not matter. `role` had a call in the episode; `low` and `high` bound the sum of its
    rewards; ids are below `before`."""

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
        where: list[str] = []
        asked: list[Any] = []
        for column in ("phase", "status", "task"):
            if value := getattr(self, column):
                where.append(f"{column} = ?")
                asked.append(value)
        if self.step is not None:
            where.append("training_step = ?")
            asked.append(self.step)
        if self.role:
            where.append("EXISTS (SELECT 1 FROM calls WHERE calls.episode = episodes.id AND role = ?)")
            asked.append(self.role)
        for sign, bound in ((">=", self.low), ("<=", self.high)):
            if bound is not None:
                where.append(f"(SELECT sum(value) FROM rewards WHERE target = episodes.id) {sign} ?")
                asked.append(bound)
        if self.before:
            where.append("id < ?")
            asked.append(self.before)
        return f"WHERE {' AND '.join(where)}" if where else "", asked


EVERYTHING = EpisodeFilters()
"""All episodes."""
