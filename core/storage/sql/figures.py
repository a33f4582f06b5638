"""The queries that count, sum, list and search records, for every store that speaks SQL. `Store` documents each
method."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cotune.errors import RecordError
from cotune.records.structs import JUDGING, REFLECTING, Task
from cotune.storage.episode_filters import COUNTED, ORDERS, CallFilters, EpisodeFilters
from cotune.storage.outcomes import ALL_OWN, LOWEST_SUM, REPORTED, outcome_means, outcome_sum, solved, success_counts
from cotune.storage.schema import FEEDBACK, NameList, Row, in_parts

T = TypeVar("T")
Default = TypeVar("Default")
_STEP = "CAST(training_step AS INTEGER)"
_TIMES = "count(*) FILTER (WHERE status = '{}')"
_LIKE = "LIKE ? ESCAPE '\\'"
AMONG = "IN (SELECT value FROM json_each(?))"
"""The condition that a column is one of a `NameList`."""
NO_END = "NOT EXISTS (SELECT 1 FROM episodes WHERE id = found.episode)"
"""The condition that an episode among those `found` has no end."""
_BESIDE = f"SELECT target FROM {FEEDBACK} AND text {_LIKE} AND target"
_NAMES = frozenset(("role", "type", "id", "finish_reason", "status", "phase"))
"""Keys in JSON whose texts nobody searches for."""


class _Asked(msgspec.Struct):
    """What a search reads of a call beside its answers."""

    messages: tuple[str, ...] = ()
    error: str | None = None


class _Input(msgspec.Struct):
    """What is read of an episode for a list."""

    task: Task


class _Chosen(msgspec.Struct):
    """What is read of a call for a list."""

    chosen: int | None = None


class _Answer(msgspec.Struct):
    """What is read of a candidate for a list: not its tokens."""

    index: int
    text: str = ""
    message: dict[str, Any] = {}


class Figures(ABC):
    """The part of a store that counts, lists and searches."""

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Rows of any SELECT."""

    # Outcomes

    def success_counts(self, episodes: Iterable[str] | None = None) -> list[tuple[str, int, int, int]]:
        if episodes is None:
            return self.rows(success_counts())
        return self.rows(success_counts(f"id {AMONG}"), (NameList.of(episodes),))

    def outcome_means(self, on_failure: str) -> list[tuple[str, str, float | None, int]]:
        return self.rows(outcome_means(on_failure))

    def outcomes_by_task(self, phase: str, on_failure: str) -> tuple[str, list[Row]]:
        measure, value = self._measured(phase, on_failure, "own")
        return measure, self.rows(
            f"""SELECT task, count(*), avg(v), min(v), max(v) FROM (
                SELECT task, {value} AS v FROM episodes {ALL_OWN} WHERE phase = ? AND {COUNTED}) AS found
                GROUP BY task ORDER BY task""",
            (phase,),
        )

    def outcomes_by_step(self, phase: str, on_failure: str, tasks: Iterable[str]) -> list[Row]:
        _, value = self._measured(phase, on_failure)
        return self.rows(
            f"""SELECT task, step, count(v), sum(v) FROM (
                SELECT task, {_STEP} AS step, {value} AS v FROM episodes WHERE phase = ? AND {COUNTED}
                AND task {AMONG} AND training_step IS NOT NULL) AS found
                GROUP BY task, step""",
            (phase, NameList.of(tasks)),
        )

    def _measured(self, phase: str, on_failure: str, *own: str) -> tuple[str, str]:
        """The name and the expression of an episode's outcome: success where an episode of the phase reports any. `own`
        is the expression for the sum of its rewards, if there is one."""
        if self.rows("SELECT 1 FROM episodes WHERE phase = ? AND success IS NOT NULL LIMIT 1", (phase,)):
            return "success", solved(*own)
        return "reward", outcome_sum(on_failure, self.rows(LOWEST_SUM, (phase,))[0][0], *own)

    def has_scored_candidates(self) -> bool:
        return bool(
            self.rows(
                """SELECT 1 FROM calls WHERE drawn > 1 AND EXISTS
                (SELECT 1 FROM rewards WHERE target > calls.id || '.' AND target < calls.id || '/') LIMIT 1"""
            )
        )

    def rewards_by_role(self) -> list[tuple[str, str, float]]:
        return self.rows(
            """SELECT role, name, avg(value) FROM rewards
            JOIN calls ON calls.id = substr(target, 1, instr(target, '.') - 1)
            WHERE instr(target, '.') > 0 GROUP BY role, name ORDER BY name"""
        )

    # Counts

    def cut_feedback(self) -> int:
        return int(self.rows(f"SELECT count(*) FROM {FEEDBACK} AND cut > 0")[0][0])

    def counts(self) -> tuple[int, int]:
        return self.rows("SELECT (SELECT count(*) FROM episodes), (SELECT count(*) FROM calls)")[0]

    def newest(self) -> tuple[int, int]:
        calls, episodes = (f"(SELECT coalesce(max(rowid), 0) FROM {table})" for table in ("calls", "episodes"))
        return self.rows(f"SELECT {calls}, {episodes}")[0]

    def episodes_by_phase(self) -> list[Row]:
        return self.rows(
            f"""SELECT phase, count(*), {_TIMES.format("ok")}, {_TIMES.format("error")}, {_TIMES.format("cancelled")},
                count(DISTINCT task), count(DISTINCT training_step), avg(latency)
            FROM episodes GROUP BY phase ORDER BY min(id)"""
        )

    def use(self, after: int) -> tuple[int, list[Row]]:
        found = self.rows(
            f"""SELECT (SELECT max(rowid) FROM calls), role, model, count(*), count(*) FILTER (WHERE status != 'ok'),
                max(turn) + 1, sum(prompt_tokens), sum(completion_tokens), sum(latency), sum(drawn)
            FROM calls {"WHERE rowid > ?" if after else ""} GROUP BY role, model ORDER BY min(started), role, model""",
            (after,) if after else (),
        )
        return (found[0][0] if found else after), [row[1:] for row in found]

    def models_asked(self, app: str = "") -> list[tuple[str, str]]:
        of_app = "AND calls.app = ?" if app else ""
        return self.rows(
            f"""SELECT DISTINCT role, model FROM calls JOIN episodes ON episodes.id = calls.episode
            WHERE phase NOT IN (?, ?) {of_app} ORDER BY role, model""",
            (JUDGING, REFLECTING, *([app] if app else [])),
        )

    def failed_episodes(self) -> list[tuple[str, str | None, int]]:
        return self.rows(
            """SELECT phase, error, count(*) FROM episodes WHERE status = 'error' GROUP BY phase, error
            ORDER BY count(*) DESC, coalesce(error, ''), phase"""
        )

    def failed_calls(self) -> list[tuple[str, str, int]]:
        return self.rows("SELECT role, status, count(*) FROM calls WHERE status != 'ok' GROUP BY 1, 2 ORDER BY 1, 2")

    def answered_by(self, policy: str) -> list[tuple[str, int]]:
        return self.rows(
            """SELECT role, count(*) FROM calls JOIN episodes ON episodes.id = calls.episode
            WHERE phase != 'check' AND policy = ?
            GROUP BY role ORDER BY role""",
            (policy,),
        )

    # Lists

    def open_episodes(self, limit: int) -> list[tuple[str, int]]:
        found = self.rows(
            f"""SELECT episode, n FROM (SELECT episode, count(*) AS n FROM calls GROUP BY episode) AS found
            WHERE {NO_END} ORDER BY episode DESC LIMIT ?""",
            (limit,),
        )
        return [(str(id), calls) for id, calls in found]

    def episode_named(self, name: str) -> str:
        if self.has_episode(name):
            return name
        end = f"%{_escaped(name)}"
        found = self.rows(
            f"""SELECT id FROM episodes WHERE id {_LIKE}
            UNION SELECT episode FROM calls WHERE episode {_LIKE} ORDER BY 1""",
            (end, end),
        )
        ids = [str(id) for (id,) in found if str(id).endswith(name)]
        if len(ids) > 1 and name not in ids:
            raise RecordError(f"{len(ids)} episodes end in {name!r}: {', '.join(ids[:3])}.", "Name one by all letters.")
        return ids[0] if len(ids) == 1 else name

    def has_episode(self, episode: str) -> bool:
        return bool(self.rows("SELECT 1 FROM episodes WHERE id = ?", (episode,)))

    def episode_ids(self, filters: EpisodeFilters, limit: int) -> list[str]:
        where, asked = filters.where()
        return [id for (id,) in self.rows(f"SELECT id FROM episodes {where} ORDER BY id DESC LIMIT ?", (*asked, limit))]

    def episode_lines(self, filters: EpisodeFilters, limit: int, order: str = "", start: int = 0) -> list[Row]:
        where, asked = filters.where()
        return self.rows(
            f"""SELECT id, task, phase, {_STEP}, status, calls, latency, error, {REPORTED}
            FROM episodes {where} ORDER BY {ORDERS[order][1]} LIMIT ? OFFSET ?""",
            (*asked, limit, start),
        )

    def inputs_and_answers(self, episodes: Iterable[str]) -> dict[str, tuple[Any, dict[str, Any] | None]]:
        found: dict[str, tuple[Any, dict[str, Any] | None]] = {}
        sql = f"""SELECT episodes.id, episodes.body, calls.body, calls.candidates
            FROM episodes LEFT JOIN calls ON calls.id = (
                SELECT latest.id FROM calls AS latest
                WHERE latest.episode = episodes.id AND latest.status = 'ok' AND latest.drawn > 0
                ORDER BY latest.step DESC LIMIT 1)
            WHERE episodes.id {AMONG}"""
        for id, body, call, candidates in self.rows(sql, (NameList.of(episodes),)):
            stored = _decoded(body, _Input, None)
            chosen = _decoded(call, _Chosen, _Chosen()).chosen
            message = None
            for one in _decoded(candidates, list[_Answer], []):
                if one.index == chosen:
                    message = one.message if one.message.get("content") else {**one.message, "content": one.text}
            found[str(id)] = (stored.task.input if stored else None, message)
        return found

    def call_ids(self, before: str, limit: int) -> list[str]:
        below, asked = ("WHERE id < ?", (before, limit)) if before else ("", (limit,))
        return [id for (id,) in self.rows(f"SELECT id FROM calls {below} ORDER BY id DESC LIMIT ?", asked)]

    def call_lines(self, calls: Sequence[str], filters: CallFilters) -> list[Row]:
        where, asked = filters.where()
        return self.rows(
            f"""SELECT calls.id, episode, step, role, turn, calls.status, task, phase, {_STEP},
                prompt_tokens, completion_tokens, calls.latency, coalesce(policy || '@' || version, model)
            FROM calls LEFT JOIN episodes ON episodes.id = calls.episode
            {f"{where} AND" if where else "WHERE"} calls.id {AMONG} ORDER BY calls.id DESC""",
            (*asked, NameList.of(calls)),
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
        sql = "SELECT DISTINCT role FROM (SELECT role FROM calls ORDER BY rowid DESC LIMIT 1000) AS latest ORDER BY 1"
        return [str(role) for (role,) in self.rows(sql)]

    def first_episodes(self, phase: str, step: int | None, tasks: Iterable[str]) -> dict[str, str]:
        found = self.rows(
            f"""SELECT task, min(id) FROM episodes
            WHERE phase = ? AND training_step {"IS NULL" if step is None else "= ?"} AND {COUNTED}
            AND task {AMONG} GROUP BY task""",
            (phase, *([] if step is None else [step]), NameList.of(tasks)),
        )
        return {str(task): str(id) for task, id in found}

    def repeated_tasks(self, phase: str, limit: int) -> list[tuple[str, int, int]]:
        return self.rows(
            f"""SELECT task, earliest, latest FROM (
                SELECT task, min(training_step) AS earliest, max(training_step) AS latest FROM episodes
                WHERE phase = ? AND {COUNTED} AND training_step >= 0 GROUP BY task) AS found
            WHERE earliest < latest ORDER BY latest - earliest DESC, task LIMIT ?""",
            (phase, limit),
        )

    def call_times(self, episode: str) -> list[Row]:
        sql = """SELECT id, step, role, turn, status, started, latency, body
            FROM calls WHERE episode = ? ORDER BY step, id"""
        return [(*row, tuple(map(str, _listed(body, "parents")))) for *row, body in self.rows(sql, (episode,))]

    def messages_of(self, episode: str, role: str, turn: int) -> list[str]:
        sql = "SELECT body FROM calls WHERE episode = ? AND role = ? AND turn = ?"
        found = self.rows(sql, (episode, role, turn))
        return _listed(found[0][0], "messages") if found else []

    # Search

    def holding(self, text: str, episodes: Sequence[str], verdicts: dict[str, bool]) -> dict[str, str]:
        asked, wanted, (as_json, plain) = NameList.of(episodes), _lower(text), _patterns(text)
        sql = f"SELECT id, body FROM episodes WHERE id {AMONG} AND body {_LIKE}"
        hits = {str(id): "" for id, body in self.rows(sql, (asked, as_json)) if _holds(body, wanted)}
        hits |= {str(id): "" for (id,) in self.rows(f"{_BESIDE} {AMONG}", (plain, asked))}
        for episode, call in self._calls_holding(text, "episode", episodes, verdicts, hits):
            hits.setdefault(episode, call)
        return hits

    def calls_holding(self, text: str, calls: Sequence[str], verdicts: dict[str, bool]) -> set[str]:
        return {call for _, call in self._calls_holding(text, "id", calls, verdicts)}

    def _calls_holding(
        self, text: str, column: str, chosen: Sequence[str], verdicts: dict[str, bool], hits: Container[str] = ()
    ) -> Iterator[tuple[str, str]]:
        """Episode and id of calls that hold a text, those with it in answers, errors and feedback first. Where `column`
        is `episode`, one of each is enough, and none of those in `hits`."""
        asked, wanted, (as_json, plain) = NameList.of(chosen), _lower(text), _patterns(text)
        beside = f"{_BESIDE} > calls.id || '.' AND target < calls.id || '/'"  # candidates: the call's id, ".", n
        sql = f"SELECT id FROM calls WHERE {column} {AMONG} AND EXISTS ({beside})"
        told = {id for (id,) in self.rows(sql, (asked, plain))}
        # First as JSON has it, which is quick, then in its values.
        sql = f"""SELECT episode, id, body, CASE WHEN candidates {_LIKE} THEN candidates END FROM calls
            WHERE {column} {AMONG} ORDER BY episode, step"""
        prompts: dict[tuple[str, str], Sequence[str]] = {}
        done: set[str] = set()
        for episode, id, body, answers in self.rows(sql, (as_json, asked)):
            if column == "episode" and (episode in hits or episode in done):
                continue
            call = _decoded(body, _Asked, _Asked())
            if id in told or wanted in _lower(call.error or "") or (answers and _holds(answers, wanted)):
                done.add(episode)
                yield str(episode), str(id)
            else:
                prompts[str(episode), str(id)] = call.messages
        if column == "episode":
            prompts = {place: ids for place, ids in prompts.items() if place[0] not in done}
        for some in in_parts({id for ids in prompts.values() for id in ids} - verdicts.keys()):
            marks = ",".join("?" * len(some))
            sql = f"SELECT id, body FROM messages WHERE id IN ({marks}) AND body {_LIKE}"
            verdicts.update(dict.fromkeys(some, False))
            verdicts.update((id, _holds(body, wanted)) for id, body in self.rows(sql, (*some, as_json)))
        yield from (place for place, ids in prompts.items() if any(verdicts[id] for id in ids))


def _patterns(text: str) -> tuple[str, str]:
    """A text as LIKE finds it in JSON, and as it is."""
    return f"%{_escaped(json.dumps(text, ensure_ascii=False)[1:-1])}%", f"%{_escaped(text)}%"


def _decoded(text: Any, kind: type[T], otherwise: Default) -> T | Default:
    """JSON of a column; `otherwise` where it is broken."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, TypeError, RecursionError):
        return otherwise


def _listed(body: Any, name: str) -> list[Any]:
    found = _decoded(body, dict[str, Any], {}).get(name)
    return found if isinstance(found, list) else []


def _holds(body: Any, wanted: str) -> bool:
    """Whether a value of JSON holds a text, not among its keys."""
    return _held(_decoded(body, Any, None), wanted)


def _held(value: Any, wanted: str) -> bool:
    if isinstance(value, str):
        return wanted in _lower(value)
    if isinstance(value, dict):
        return any(_held(part, wanted) for key, part in value.items() if not (key in _NAMES and isinstance(part, str)))
    return isinstance(value, list) and any(_held(part, wanted) for part in value)


def _lower(text: str) -> str:
    """Letters of ASCII in lower case, as LIKE compares."""
    return text.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
