"""Figures of a records file, by SQL: what `Store` promises under the same names."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.outcomes import outcome_means, success_counts
from cotune.storage.schema import Row

_EPISODES_BY_PHASE = """
    SELECT phase, count(*), sum(status = 'ok'), sum(status = 'error'), sum(status = 'cancelled'),
           sum(status = 'abandoned'), count(DISTINCT task), count(DISTINCT training_step),
           coalesce(avg(json_extract(body, '$.latency')), 0)
    FROM episodes GROUP BY phase ORDER BY min(id)"""
_CALLS_BY_ROLE = """
    SELECT role, count(*), sum(status != 'ok'), max(turn) + 1, sum(json_array_length(candidates)),
           sum(prompt_tokens), sum(completion_tokens), coalesce(avg(json_extract(body, '$.latency')), 0)
    FROM calls GROUP BY role ORDER BY min(id)"""
_REWARDS_BY_ROLE = """
    SELECT role, name, avg(value) FROM rewards JOIN calls ON calls.id = substr(target, 1, instr(target, '.') - 1)
    WHERE instr(target, '.') > 0 AND episode NOT IN (SELECT id FROM episodes WHERE status = 'abandoned')
    GROUP BY role, name ORDER BY name"""
_CAUSES = """
    SELECT phase, CASE WHEN json_valid(body) THEN CAST(json_extract(body, '$.error') AS TEXT) END AS cause,
           count(*) AS times
    FROM episodes WHERE status = 'error' GROUP BY 1, 2 ORDER BY times DESC, cause"""
_FAILED_CALLS = "SELECT role, status, count(*) FROM calls WHERE status != 'ok' GROUP BY 1, 2 ORDER BY 1, 2"
_ANSWERED_BY = """
    SELECT role, count(*) FROM calls JOIN episodes ON episodes.id = calls.episode
    WHERE phase != 'check' AND CASE WHEN json_valid(calls.body) THEN json_extract(calls.body, '$.policy.name') END = ?
    GROUP BY role ORDER BY role"""
_OPEN = """
    SELECT episode, count(*) FROM calls WHERE episode NOT IN (SELECT id FROM episodes)
    GROUP BY episode ORDER BY episode DESC LIMIT ?"""
_SCORED = """
    SELECT 1 FROM calls WHERE json_array_length(candidates) > 1 AND EXISTS
    (SELECT 1 FROM rewards WHERE target > calls.id || '.' AND target < calls.id || '/') LIMIT 1"""


class SqliteFigures:
    """The part of `SqliteStore` that sums and counts."""

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Rows of any SELECT."""

    def success_counts(self, episodes: Iterable[str] | None = None) -> list[tuple[str, int, int]]:
        """See `Store.success_counts`."""
        if episodes is None:
            return self.rows(success_counts())
        return self.rows(success_counts("id IN (SELECT value FROM json_each(?))"), (json.dumps([*episodes]),))

    def outcome_means(self, on_failure: str) -> list[tuple[str, str, float | None, int]]:
        """See `Store.outcome_means`."""
        return self.rows(outcome_means(on_failure))

    def episodes_by_phase(self) -> list[Row]:
        """See `Store.episodes_by_phase`."""
        return self.rows(_EPISODES_BY_PHASE)

    def calls_by_role(self) -> list[Row]:
        """See `Store.calls_by_role`."""
        return self.rows(_CALLS_BY_ROLE)

    def rewards_by_role(self) -> list[tuple[str, str, float]]:
        """See `Store.rewards_by_role`."""
        return self.rows(_REWARDS_BY_ROLE)

    def failed_episodes(self) -> list[tuple[str, str | None, int]]:
        """See `Store.failed_episodes`."""
        return self.rows(_CAUSES)

    def failed_calls(self) -> list[tuple[str, str, int]]:
        """See `Store.failed_calls`."""
        return self.rows(_FAILED_CALLS)

    def answered_by(self, policy: str) -> list[tuple[str, int]]:
        """See `Store.answered_by`."""
        return self.rows(_ANSWERED_BY, (policy,))

    def open_episodes(self, limit: int) -> list[tuple[str, int]]:
        """See `Store.open_episodes`."""
        return [(str(id), calls) for id, calls in self.rows(_OPEN, (limit,))]

    def episode_ids(self, filters: EpisodeFilters, limit: int) -> list[str]:
        """See `Store.episode_ids`."""
        where, asked = filters.where()
        return [id for (id,) in self.rows(f"SELECT id FROM episodes {where} ORDER BY id DESC LIMIT ?", (*asked, limit))]

    def episode_count(self, filters: EpisodeFilters) -> int:
        """See `Store.episode_count`."""
        where, asked = filters.where()
        return int(self.rows(f"SELECT count(*) FROM episodes {where}", asked)[0][0])

    def has_scored_candidates(self) -> bool:
        """See `Store.has_scored_candidates`."""
        return bool(self.rows(_SCORED))
