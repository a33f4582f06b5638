"""Filters of episodes and of calls, as conditions of SQL."""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.storage.outcomes import REPORTED
from cotune.storage.schema import AMONG, NameList

COUNTED = "status != 'cancelled'"
"""The SQL condition that an episode counts in figures: it was not cancelled."""


_NEW = """(rowid > ? AND rowid <= ?
    OR id IN (SELECT target FROM rewards WHERE rowid > ? AND rowid <= ?)
    OR id IN (SELECT episode FROM calls JOIN rewards ON calls.id = substr(target, 1, instr(target, '.') - 1)
        WHERE instr(target, '.') > 0 AND rewards.rowid > ? AND rewards.rowid <= ?))"""
"""Whether an episode, or a reward for it or for one of its answers, was stored between two marks."""

_REWARDS = "(SELECT sum(value) FROM rewards WHERE target = episodes.id)"
ORDERS = {
    "": ("newest first", "id DESC"),
    "oldest": ("oldest first", "id"),
    "lowest": ("lowest reward first", f"{_REWARDS} IS NULL, {_REWARDS}, id DESC"),
    "highest": ("highest reward first", f"{_REWARDS} IS NULL, {_REWARDS} DESC, id DESC"),
    "longest": ("longest first", "latency DESC, id DESC"),
    "calls": ("most calls first", "calls DESC, id DESC"),
    "task": ("by task", "task, id DESC"),
}
"""Orders of episodes: the text that people see, and the order in SQL."""


class EpisodeFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that an episode must meet. Empty fields and None are ignored.

    `status` may be `counted`, for all but cancelled episodes. `role` made a call in the episode. `low` and `high` bound
    the sum of its rewards. `training_step` counts from 0. The id is among `ids` and below `before`. `app` is the
    application, `version` the version of the policy in one of its calls. `since` and `until` bound the start, in
    seconds since the epoch. `new` holds two marks of a store (`Figures.marks`): the episode, or a reward for it, was
    stored between them. `solved` is `yes` or `no`, as the episode reports it; a failed episode counts as not solved.
    """

    phase: str = ""
    status: str = ""
    role: str = ""
    task: str = ""
    training_step: int | None = None
    low: float | None = None
    high: float | None = None
    ids: tuple[str, ...] | None = None
    before: str = ""
    app: str = ""
    version: int | None = None
    since: float | None = None
    until: float | None = None
    new: tuple[tuple[int, int], tuple[int, int]] | None = None
    solved: str = ""

    def where(self) -> tuple[str, list[Any]]:
        """The WHERE clause over episodes, empty without conditions, and its parameters in order."""
        status_condition = "status = ?"
        if self.status == "counted":  # not a status: it stands for all episodes except cancelled ones
            status_condition = f"({COUNTED}) = (? = 'counted')"
        solved_as_number = None
        if self.solved == "yes":
            solved_as_number = 1
        elif self.solved == "no":
            solved_as_number = 0
        conditions = {
            "phase = ?": self.phase,
            status_condition: self.status,
            "task = ?": self.task,
            "training_step = ?": self.training_step,
            "EXISTS (SELECT 1 FROM calls WHERE calls.episode = episodes.id AND role = ?)": self.role,
            f"{_REWARDS} >= ?": self.low,
            f"{_REWARDS} <= ?": self.high,
            f"coalesce({REPORTED}, CASE WHEN status = 'error' THEN 0 END) = ?": solved_as_number,
            f"id {AMONG}": None if self.ids is None else NameList.of(self.ids),
            "id < ?": self.before,
            "app = ?": self.app,
            "EXISTS (SELECT 1 FROM calls WHERE calls.episode = episodes.id AND version = ?)": self.version,
            "started >= ?": self.since,
            "started < ?": self.until,
        }
        clause, values = _where(conditions)
        if self.new is not None:
            # A mark has the numbers of the last episode and the last reward at that time.
            (old_episode, old_reward), (last_episode, last_reward) = self.new
            clause = f"{clause} AND {_NEW}" if clause else f"WHERE {_NEW}"
            values += [old_episode, last_episode, old_reward, last_reward, old_reward, last_reward]
        return clause, values


class CallFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that a call must meet. Empty fields and None are ignored. `phase`, `step` (from 1) and `task` describe
    the episode of the call."""

    role: str = ""
    status: str = ""
    turn: int | None = None
    phase: str = ""
    step: int | None = None
    task: str = ""

    def where(self) -> tuple[str, list[Any]]:
        """The WHERE clause over calls and episodes, empty without conditions, and its parameters in order."""
        return _where(
            {
                "calls.role = ?": self.role,
                "calls.status = ?": self.status,
                "calls.turn = ?": self.turn,
                "episodes.phase = ?": self.phase,
                "episodes.training_step = ? - 1": self.step,
                "episodes.task = ?": self.task,
            }
        )


def _where(conditions: dict[str, Any]) -> tuple[str, list[Any]]:
    """The WHERE clause of the conditions that have a value, empty without any, and these values in order."""
    active = {condition: value for condition, value in conditions.items() if value not in ("", None)}
    clause = f"WHERE {' AND '.join(active)}" if active else ""
    return clause, list(active.values())


EVERYTHING = EpisodeFilters()
"""All episodes."""


_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def moment(field: str, text: str) -> float:
    """A moment in seconds since the epoch, from a duration before now (such as 30d) or a day in UTC (such as
    2026-11-30). Raises ConfigError, which names the setting `field`."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text):
        return time.time() - float(match[1]) * _UNITS[match[2]]
    try:
        return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC).timestamp()
    except ValueError:
        remedy = "Write a number with m, h, d or w, such as 30d, or a day, such as 2026-11-30."
        raise ConfigError(field, text, "is not a time", remedy) from None
