"""The queries that count, sum, list and search a records file. `Store` documents each method."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cotune.errors import RecordError
from cotune.storage.episode_filters import COUNTED, EpisodeFilters
from cotune.storage.outcomes import LOWEST_SUM, REPORTED, SOLVED, outcome_means, outcome_sum, success_counts
from cotune.storage.schema import FEEDBACK, Row, in_parts

_HOLDS = """(body LIKE ? ESCAPE '\\' AND EXISTS (
    SELECT 1 FROM json_tree(body) AS part WHERE part.type = 'text' AND part.atom LIKE ? ESCAPE '\\'
    AND coalesce(part.key, '') NOT IN ('role', 'type', 'id', 'finish_reason', 'status', 'phase')))"""
"""Whether a JSON value holds a text: first as JSON has it, which is quick, then in its values, not in its keys."""
_STEP = "CAST(training_step AS INTEGER)"
_MODEL = "CASE WHEN json_valid(body) THEN coalesce(json_extract(body, '$.model'), '') ELSE '' END"


def _seconds(name: str) -> str:
    return f"CAST(coalesce(json_extract(body, '$.{name}'), 0) AS REAL)"


class SqliteFigures:
    """The part of `SqliteStore` that counts, lists and searches."""

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Rows of any SELECT."""

    # Outcomes

    def success_counts(self, episodes: Iterable[str] | None = None) -> list[tuple[str, int, int]]:
        if episodes is None:
            return self.rows(success_counts())
        return self.rows(success_counts("id IN (SELECT value FROM json_each(?))"), (json.dumps([*episodes]),))

    def outcome_means(self, on_failure: str) -> list[tuple[str, str, float | None, int]]:
        return self.rows(outcome_means(on_failure))

    def outcomes_by_task(self, phase: str, on_failure: str) -> tuple[str, list[Row]]:
        measure, value = self._measured(phase, on_failure)
        return measure, self.rows(
            f"""SELECT task, count(*), avg(v), min(v), max(v) FROM (
                SELECT task, {value} AS v FROM episodes WHERE phase = ? AND {COUNTED}) GROUP BY task ORDER BY task""",
            (phase,),
        )

    def outcomes_by_step(self, phase: str, on_failure: str, tasks: Iterable[str]) -> list[Row]:
        _, value = self._measured(phase, on_failure)
        return self.rows(
            f"""SELECT task, step, count(v), sum(v) FROM (
                SELECT task, {_STEP} AS step, {value} AS v FROM episodes WHERE phase = ? AND {COUNTED}
                AND task IN (SELECT value FROM json_each(?)) AND training_step IS NOT NULL)
                GROUP BY task, step""",
            (phase, json.dumps([*tasks])),
        )

    def _measured(self, phase: str, on_failure: str) -> tuple[str, str]:
        """The name and the expression of an episode's outcome: success where an episode of the phase reports any."""
        if self.rows(f"SELECT 1 FROM episodes WHERE phase = ? AND {REPORTED} IS NOT NULL LIMIT 1", (phase,)):
            return "success", SOLVED
        return "reward", outcome_sum(on_failure, self.rows(LOWEST_SUM, (phase,))[0][0])

    def has_scored_candidates(self) -> bool:
        return bool(
            self.rows(
                """SELECT 1 FROM calls WHERE json_array_length(candidates) > 1 AND EXISTS
                (SELECT 1 FROM rewards WHERE target > calls.id || '.' AND target < calls.id || '/') LIMIT 1"""
            )
        )

    def rewards_by_role(self) -> list[tuple[str, str, float]]:
        return self.rows(
            """SELECT role, name, avg(value) FROM rewards
            JOIN calls ON calls.id = substr(target, 1, instr(target, '.') - 1)
            WHERE instr(target, '.') > 0 AND episode NOT IN (SELECT id FROM episodes WHERE status = 'abandoned')
            GROUP BY role, name ORDER BY name"""
        )

    # Counts

    def cut_feedback(self) -> int:
        return int(self.rows(f"SELECT count(*) FROM {FEEDBACK} AND cut > 0")[0][0])

    def counts(self) -> tuple[int, int, int]:
        abandoned = "(SELECT count(*) FROM episodes WHERE status = 'abandoned')"
        return self.rows(f"SELECT (SELECT count(*) FROM episodes), {abandoned}, (SELECT count(*) FROM calls)")[0]

    def newest(self) -> tuple[int, int]:
        calls, episodes = (f"(SELECT coalesce(max(rowid), 0) FROM {table})" for table in ("calls", "episodes"))
        return self.rows(f"SELECT {calls}, {episodes}")[0]

    def episodes_by_phase(self) -> list[Row]:
        return self.rows(
            """SELECT phase, count(*), sum(status = 'ok'), sum(status = 'error'), sum(status = 'cancelled'),
                sum(status = 'abandoned'), count(DISTINCT task), count(DISTINCT training_step),
                coalesce(avg(json_extract(body, '$.latency')), 0)
            FROM episodes GROUP BY phase ORDER BY min(id)"""
        )

    def use(self, after: int, until: int) -> list[Row]:
        return self.rows(
            f"""SELECT role, {_MODEL}, count(*), sum(status != 'ok'), max(turn) + 1, sum(prompt_tokens),
                sum(completion_tokens), sum(iif(json_valid(body), json_extract(body, '$.latency'), 0))
            FROM calls WHERE rowid > ? AND rowid <= ? GROUP BY 1, 2 ORDER BY min(id)""",
            (after, until),
        )

    def candidates_by_role(self) -> dict[str, int]:
        count = "sum(json_array_length(iif(json_valid(candidates), candidates, '[]')))"
        return {str(role): count for role, count in self.rows(f"SELECT role, {count} FROM calls GROUP BY role")}

    def failed_episodes(self) -> list[tuple[str, str | None, int]]:
        return self.rows(
            """SELECT phase, CASE WHEN json_valid(body) THEN CAST(json_extract(body, '$.error') AS TEXT) END AS cause,
                count(*) AS times
            FROM episodes WHERE status = 'error' GROUP BY 1, 2 ORDER BY times DESC, cause"""
        )

    def failed_calls(self) -> list[tuple[str, str, int]]:
        return self.rows("SELECT role, status, count(*) FROM calls WHERE status != 'ok' GROUP BY 1, 2 ORDER BY 1, 2")

    def answered_by(self, policy: str) -> list[tuple[str, int]]:
        return self.rows(
            """SELECT role, count(*) FROM calls JOIN episodes ON episodes.id = calls.episode
            WHERE phase != 'check'
            AND CASE WHEN json_valid(calls.body) THEN json_extract(calls.body, '$.policy.name') END = ?
            GROUP BY role ORDER BY role""",
            (policy,),
        )

    # Lists

    def open_episodes(self, limit: int) -> list[tuple[str, int]]:
        found = self.rows(
            """SELECT episode, count(*) FROM calls WHERE episode NOT IN (SELECT id FROM episodes)
            GROUP BY episode ORDER BY episode DESC LIMIT ?""",
            (limit,),
        )
        return [(str(id), calls) for id, calls in found]

    def episode_named(self, name: str) -> str:
        found = self.rows(
            """SELECT id FROM episodes WHERE substr(id, -length(?1)) = ?1
            UNION SELECT episode FROM calls WHERE substr(episode, -length(?1)) = ?1 ORDER BY 1""",
            (name,),
        )
        ids = [str(id) for (id,) in found]
        if len(ids) > 1 and name not in ids:
            raise RecordError(f"{len(ids)} episodes end in {name!r}: {', '.join(ids[:3])}.", "Name one by all letters.")
        return ids[0] if len(ids) == 1 else name

    def has_episode(self, episode: str) -> bool:
        return bool(self.rows("SELECT 1 FROM episodes WHERE id = ?", (episode,)))

    def episode_ids(self, filters: EpisodeFilters, limit: int) -> list[str]:
        where, asked = filters.where()
        return [id for (id,) in self.rows(f"SELECT id FROM episodes {where} ORDER BY id DESC LIMIT ?", (*asked, limit))]

    def episode_lines(self, filters: EpisodeFilters, limit: int) -> list[Row]:
        where, asked = filters.where()
        calls = "CAST(coalesce(json_extract(body, '$.calls'), 0) AS INTEGER)"
        return self.rows(
            f"""SELECT id, task, phase, {_STEP}, status, {calls}, {_seconds("latency")},
                CAST(json_extract(body, '$.error') AS TEXT), {REPORTED}
            FROM episodes {where} ORDER BY id DESC LIMIT ?""",
            (*asked, limit),
        )

    def episode_count(self, filters: EpisodeFilters) -> int:
        where, asked = filters.where()
        return int(self.rows(f"SELECT count(*) FROM episodes {where}", asked)[0][0])

    def neighbours(self, episode: str) -> tuple[str, str]:
        asked = "(SELECT max(id) FROM episodes WHERE id < ?), (SELECT min(id) FROM episodes WHERE id > ?)"
        older, newer = self.rows(f"SELECT {asked}", (episode, episode))[0]
        return older or "", newer or ""

    def phases(self) -> list[str]:
        return [phase for (phase,) in self.rows("SELECT DISTINCT phase FROM episodes ORDER BY 1")]

    def steps(self, phase: str) -> list[int]:
        sql = f"""SELECT DISTINCT {_STEP} FROM episodes
            WHERE phase = ? AND training_step IS NOT NULL AND {COUNTED} ORDER BY 1"""
        return [step for (step,) in self.rows(sql, (phase,))]

    def recent_roles(self) -> list[str]:
        sql = "SELECT DISTINCT role FROM (SELECT role FROM calls ORDER BY rowid DESC LIMIT 1000) ORDER BY 1"
        return [str(role) for (role,) in self.rows(sql)]

    def first_episodes(self, phase: str, step: int | None, tasks: Iterable[str]) -> dict[str, str]:
        found = self.rows(
            f"""SELECT task, min(id) FROM episodes WHERE phase = ? AND training_step IS ? AND {COUNTED}
            AND task IN (SELECT value FROM json_each(?)) GROUP BY task""",
            (phase, step, json.dumps([*tasks])),
        )
        return {str(task): str(id) for task, id in found}

    def repeated_tasks(self, phase: str, limit: int) -> list[tuple[str, int, int]]:
        return self.rows(
            f"""SELECT task, min(training_step) AS first, max(training_step) AS last FROM episodes
            WHERE phase = ? AND {COUNTED} AND training_step >= 0
            GROUP BY task HAVING first < last ORDER BY last - first DESC, task LIMIT ?""",
            (phase, limit),
        )

    def call_times(self, episode: str) -> list[Row]:
        parents = "iif(json_type(body, '$.parents') = 'array', json_extract(body, '$.parents'), '[]')"
        found = self.rows(
            f"""SELECT id, step, role, turn, status, {_seconds("started")}, {_seconds("latency")}, {parents}
            FROM calls WHERE episode = ? ORDER BY step, id""",
            (episode,),
        )
        return [(*row, tuple(map(str, json.loads(parents)))) for *row, parents in found]

    def messages_of(self, episode: str, role: str, turn: int) -> list[str]:
        sql = "SELECT json_extract(body, '$.messages') FROM calls WHERE episode = ? AND role = ? AND turn = ?"
        found = self.rows(sql, (episode, role, turn))
        return json.loads(found[0][0] or "[]") if found else []

    # Search

    def holding(self, text: str, episodes: Sequence[str], verdicts: dict[str, bool]) -> set[str]:
        asked = json.dumps([*episodes])
        needles = (f"%{_escaped(json.dumps(text, ensure_ascii=False)[1:-1])}%", f"%{_escaped(text)}%")
        chosen = f"SELECT id FROM episodes WHERE id IN (SELECT value FROM json_each(?)) AND {_HOLDS}"
        hits = {id for (id,) in self.rows(chosen, (asked, *needles))}
        beside = f"SELECT target FROM {FEEDBACK} AND text LIKE ? ESCAPE '\\' AND target"
        of_calls = f"""SELECT DISTINCT episode FROM calls WHERE episode IN (SELECT value FROM json_each(?))
            AND EXISTS ({beside} > calls.id || '.' AND target < calls.id || '/')"""  # candidates: the call's id, ".", n
        hits |= {id for (id,) in self.rows(f"{beside} IN (SELECT value FROM json_each(?))", (needles[1], asked))}
        hits |= {id for (id,) in self.rows(of_calls, (asked, needles[1]))}
        answers = _HOLDS.replace("body", "candidates")
        sql = f"""SELECT episode, {answers} OR coalesce(json_extract(body, '$.error'), '') LIKE ? ESCAPE '\\',
            json_extract(body, '$.messages') FROM calls WHERE episode IN (SELECT value FROM json_each(?))"""
        prompts: dict[str, set[str]] = {}
        for episode, answered, messages in self.rows(sql, (*needles, needles[1], asked)):
            if answered:
                hits.add(episode)
            elif episode not in hits:
                prompts.setdefault(episode, set()).update(json.loads(messages or "[]"))
        for some in in_parts({id for ids in prompts.values() for id in ids} - verdicts.keys()):
            sql = f"SELECT id FROM messages WHERE id IN ({','.join('?' * len(some))}) AND {_HOLDS}"
            verdicts.update(dict.fromkeys(some, False))
            verdicts.update((id, True) for (id,) in self.rows(sql, (*some, *needles)))
        return hits | {episode for episode, ids in prompts.items() if any(verdicts[id] for id in ids)}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
