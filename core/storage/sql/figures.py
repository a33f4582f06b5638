"""Queries of screens, reports and upkeep: counts, sums, lists and searches, over any store that speaks SQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from cotune.errors import RecordError
from cotune.records.structs import JUDGING, REFLECTING, CallRecord, Task
from cotune.storage.episode_filters import COUNTED, ORDERS, CallFilters, EpisodeFilters
from cotune.storage.outcomes import (
    ALL_OWN,
    IS_OUTCOME,
    LOWEST_SUM,
    REPORTED,
    REWARD_SUM,
    outcome_means,
    outcome_sum,
    solved,
    success_counts,
)
from cotune.storage.schema import AMONG, FEEDBACK, NameList, Row, in_parts
from cotune.storage.sql.owners import episodes_with_keys

T = TypeVar("T")
Default = TypeVar("Default")
_STEP = "CAST(training_step AS INTEGER)"
_COUNT_OF_STATUS = "count(*) FILTER (WHERE status = '{}')"
_LIKE = "LIKE ? ESCAPE '\\'"
NO_END = "NOT EXISTS (SELECT 1 FROM episodes WHERE id = found.episode)"
"""The condition that an episode of the subquery `found` has no end."""
_FEEDBACK_TARGETS = f"SELECT target FROM {FEEDBACK} AND text {_LIKE} AND target"
_NOT_SEARCHED = frozenset(("role", "type", "id", "finish_reason", "status", "phase"))
"""Keys in JSON whose texts a search ignores."""


class _SearchedCall(msgspec.Struct):
    """The fields of a call, apart from its answers, that a search reads."""

    messages: tuple[str, ...] = ()
    error: str | None = None


class _EpisodeTask(msgspec.Struct):
    """The field of an episode that a list reads."""

    task: Task


class _ChosenIndex(msgspec.Struct):
    """The field of a call that a list reads."""

    chosen: int | None = None


class _Answer(msgspec.Struct):
    """The fields of a candidate that a list reads: not its tokens."""

    index: int
    text: str = ""
    message: dict[str, Any] = {}


class SuccessCount(NamedTuple):
    """The number of solved episodes of a phase that reports `success`."""

    phase: str
    solved: int
    episodes: int
    """Counted episodes. Failures of the policy count; cancelled episodes and infrastructure failures do not."""
    squares: int
    """The sum over tasks of the square of their number of episodes."""


class OutcomeMean(NamedTuple):
    """The mean of one component of the outcomes of a phase."""

    phase: str
    name: str
    mean: float | None
    episodes: int
    """Episodes in the mean, with failed ones unless `on_failure` excludes them."""


class TaskOutcome(NamedTuple):
    """The outcomes of a task's episodes; None if no episode has one."""

    task: str
    episodes: int
    """All that were not cancelled, with or without an outcome."""
    mean: float | None
    lowest: float | None
    highest: float | None


class StepOutcome(NamedTuple):
    """The outcomes of a task's episodes in one training step."""

    task: str
    step: int
    """From 0."""
    episodes: int
    """Number of episodes with an outcome."""
    total: float | None
    """The sum of the outcomes; None without any."""


class PhaseCount(NamedTuple):
    """Episodes of a phase."""

    phase: str
    episodes: int
    ok: int
    failed: int
    cancelled: int
    tasks: int
    """Different tasks."""
    steps: int
    """Different training steps."""
    mean_seconds: float | None


class RoleUse(NamedTuple):
    """The calls of a role to a model, summed up."""

    role: str
    model: str
    calls: int
    failed: int
    turns: int
    """The most turns in one episode."""
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    candidates: int


class EpisodeLine(NamedTuple):
    """A line of a list of episodes."""

    id: str
    task: str
    phase: str
    training_step: int | None
    status: str
    calls: int
    seconds: float
    error: str | None
    solved: int | None
    """Whether the episode reports that it solved its task; None if it does not report this."""
    is_outcome: int
    """Whether its end depends on its policies (`Episode.is_outcome`)."""


class CallLine(NamedTuple):
    """A line of a list of calls."""

    id: str
    episode: str
    step: int
    role: str
    turn: int
    status: str
    task: str | None
    phase: str | None
    training_step: int | None
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    answered_by: str
    """Policy and version, or the model."""


class CallTime(NamedTuple):
    """When a call of an episode ran, and which calls came before it."""

    id: str
    step: int
    role: str
    turn: int
    status: str
    started: float
    seconds: float
    parents: tuple[str, ...]


class CallCount(NamedTuple):
    """The calls of one application, role, policy version and day. `policy` is empty for a model that is no policy."""

    app: str
    role: str
    policy: str
    version: int | None
    day: str
    calls: int
    failed: int
    prompt_tokens: int
    answer_tokens: int


class AppCount(NamedTuple):
    """The episodes of an application."""

    app: str
    episodes: int
    ok: int
    calls: int
    first: float
    """When the first episode started, in seconds since the epoch."""
    last: float
    """When the last one started."""
    rewarded: int
    """Number of episodes with a reward."""


_LAST_NUMBER = "(SELECT coalesce(max(rowid), 0) FROM {})"
"""An SQL expression: the number of the last row of a table, 0 without rows."""


class Figures:
    """Counts, lists and searches. `Store.figures` returns it. Like other reads, it sees only committed records."""

    def __init__(
        self,
        rows: Callable[..., list[Row]],
        read_calls: Callable[[str, Sequence[Any]], list[CallRecord]],
        address: str,
    ) -> None:
        """`rows` runs a SELECT with its parameters; `read_calls` reads the calls that a condition chooses."""
        self.rows = rows
        self._read_calls = read_calls
        self._address = address

    # Outcomes

    def success_counts(self, episodes: Iterable[str] | None = None) -> list[SuccessCount]:
        """A row for each phase in which an episode reports `success`. With `episodes`, only these ids are counted."""
        if episodes is None:
            rows = self.rows(success_counts())
        else:
            rows = self.rows(success_counts(f"id {AMONG}"), (NameList.of(episodes),))
        return [SuccessCount(*row) for row in rows]

    def outcome_means(self, on_failure: str) -> list[OutcomeMean]:
        """A row for each phase and component of its outcomes."""
        return [OutcomeMean(*row) for row in self.rows(outcome_means(on_failure))]

    def outcomes_by_task(self, phase: str, on_failure: str) -> tuple[str, list[TaskOutcome]]:
        """The name of the outcome and its rows by task: `success` if an episode of the phase reports it, else `reward`,
        the sum of the components."""
        reward_sum = "own"  # the column that the join `ALL_OWN` adds
        measure, value = self._outcome_expression(phase, on_failure, reward_sum)
        rows = self.rows(
            f"""SELECT task, count(*), avg(v), min(v), max(v) FROM (
                SELECT task, {value} AS v FROM episodes {ALL_OWN} WHERE phase = ? AND {COUNTED}) AS found
                GROUP BY task ORDER BY task""",
            (phase,),
        )
        return measure, [TaskOutcome(*row) for row in rows]

    def outcomes_by_step(self, phase: str, on_failure: str, tasks: Iterable[str]) -> list[StepOutcome]:
        """The outcomes of these tasks: a row for each task and training step."""
        _, value = self._outcome_expression(phase, on_failure)
        rows = self.rows(
            f"""SELECT task, step, count(v), sum(v) FROM (
                SELECT task, {_STEP} AS step, {value} AS v FROM episodes WHERE phase = ? AND {COUNTED}
                AND task {AMONG} AND training_step IS NOT NULL) AS found
                GROUP BY task, step""",
            (phase, NameList.of(tasks)),
        )
        return [StepOutcome(*row) for row in rows]

    def _outcome_expression(self, phase: str, on_failure: str, reward_sum: str = REWARD_SUM) -> tuple[str, str]:
        """The name and the SQL expression of an episode's outcome: `success` if an episode of the phase reports it,
        else `reward`, the sum of its rewards. `reward_sum` is the expression for this sum."""
        if self.rows("SELECT 1 FROM episodes WHERE phase = ? AND success IS NOT NULL LIMIT 1", (phase,)):
            return "success", solved(reward_sum)
        ((lowest,),) = self.rows(LOWEST_SUM, (phase,))
        return "reward", outcome_sum(on_failure, lowest, reward_sum)

    def has_scored_candidates(self) -> bool:
        """Whether, in a call with several candidates, any candidate has a reward."""
        return bool(
            self.rows(
                """SELECT 1 FROM calls WHERE drawn > 1 AND EXISTS
                (SELECT 1 FROM rewards WHERE target > calls.id || '.' AND target < calls.id || '/') LIMIT 1"""
            )
        )

    def rewards_by_role(self) -> list[tuple[str, str, float]]:
        """Role, name and mean of the rewards of candidates."""
        return self.rows(
            """SELECT role, name, avg(value) FROM rewards
            JOIN calls ON calls.id = substr(target, 1, instr(target, '.') - 1)
            WHERE instr(target, '.') > 0 GROUP BY role, name ORDER BY name"""
        )

    # Counts

    def marks(self) -> tuple[int, int]:
        """Numbers of the last episode and the last reward that are stored. Later ones have higher numbers."""
        return self.rows(f"SELECT {_LAST_NUMBER.format('episodes')}, {_LAST_NUMBER.format('rewards')}")[0]

    def cut_feedback(self) -> int:
        """Number of texts given with rewards that were too long and are cut."""
        return int(self.rows(f"SELECT count(*) FROM {FEEDBACK} AND cut > 0")[0][0])

    def counts(self) -> tuple[int, int]:
        """Episodes and calls."""
        return self.rows("SELECT (SELECT count(*) FROM episodes), (SELECT count(*) FROM calls)")[0]

    def newest(self) -> tuple[int, int]:
        """Numbers of the last call and the last episode that are stored. Later ones have higher numbers."""
        return self.rows(f"SELECT {_LAST_NUMBER.format('calls')}, {_LAST_NUMBER.format('episodes')}")[0]

    def episodes_by_phase(self) -> list[PhaseCount]:
        """Counts of the episodes of each phase, in the order of the phases' first episodes."""
        n_ok, n_failed, n_cancelled = map(_COUNT_OF_STATUS.format, ("ok", "error", "cancelled"))
        rows = self.rows(
            f"""SELECT phase, count(*), {n_ok}, {n_failed}, {n_cancelled},
                count(DISTINCT task), count(DISTINCT training_step), avg(latency)
            FROM episodes GROUP BY phase ORDER BY min(id)"""
        )
        return [PhaseCount(*row) for row in rows]

    def use(self, after: int) -> tuple[int, list[RoleUse]]:
        """The number, tokens and seconds of new calls, summed for each role and model. Calls are numbered as they are
        stored (rowid); new ones have a number above `after`. With 0, all calls are new.

        Returns the number to pass as `after` next time, and the sums in the order of the first calls.
        """
        rows = self.rows(
            f"""SELECT (SELECT max(rowid) FROM calls), role, model, count(*), count(*) FILTER (WHERE status != 'ok'),
                max(turn) + 1, sum(prompt_tokens), sum(completion_tokens), sum(latency), sum(drawn)
            FROM calls {"WHERE rowid > ?" if after else ""} GROUP BY role, model ORDER BY min(started), role, model""",
            (after,) if after else (),
        )
        last_number = rows[0][0] if rows else after
        return last_number, [RoleUse(*row[1:]) for row in rows]

    def models_asked(self, app: str = "") -> list[tuple[str, str]]:
        """The pairs of a role and the name of the model that it asks, in one application, or in all without `app`.

        Calls of judges and calls that proposed prompts are left out."""
        parameters = [JUDGING, REFLECTING]
        of_app = ""
        if app:
            of_app = "AND calls.app = ?"
            parameters.append(app)
        return self.rows(
            f"""SELECT DISTINCT role, model FROM calls JOIN episodes ON episodes.id = calls.episode
            WHERE phase NOT IN (?, ?) {of_app} ORDER BY role, model""",
            parameters,
        )

    def failed_episodes(self) -> list[tuple[str, str | None, int]]:
        """Phase, error and number of failed episodes, the commonest first."""
        return self.rows(
            """SELECT phase, error, count(*) FROM episodes WHERE status = 'error' GROUP BY phase, error
            ORDER BY count(*) DESC, coalesce(error, ''), phase"""
        )

    def failed_calls(self) -> list[tuple[str, str, int]]:
        """Role, status and number of failed calls."""
        return self.rows("SELECT role, status, count(*) FROM calls WHERE status != 'ok' GROUP BY 1, 2 ORDER BY 1, 2")

    def answered_by(self, policy: str) -> list[tuple[str, int]]:
        """The number of calls that this policy answered, by role. Calls of `cotune check` do not count."""
        return self.rows(
            """SELECT role, count(*) FROM calls JOIN episodes ON episodes.id = calls.episode
            WHERE phase != 'check' AND policy = ?
            GROUP BY role ORDER BY role""",
            (policy,),
        )

    def by_day(self, app: str = "") -> list[CallCount]:
        """Calls of one application, or of all without `app`: a row for each application, day, role, policy and
        version."""
        rows = self.rows(
            f"""SELECT app, role, coalesce(policy, ''), version, date(started, 'unixepoch') AS day, count(*),
                count(*) FILTER (WHERE status != 'ok'), sum(prompt_tokens), sum(completion_tokens)
            FROM calls {"WHERE app = ?" if app else ""} GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 5, 2, 3, 4""",
            [app] if app else [],
        )
        return [CallCount(*row) for row in rows]

    def apps(self) -> list[AppCount]:
        """Counts of the episodes of each application, by the name of the application."""
        rows = self.rows(
            """SELECT app, count(*), count(*) FILTER (WHERE status = 'ok'), sum(calls), min(started), max(started),
                count(*) FILTER (WHERE EXISTS (SELECT 1 FROM rewards WHERE target = episodes.id))
            FROM episodes GROUP BY app ORDER BY app"""
        )
        return [AppCount(*row) for row in rows]

    def episodes_with_key(self, app: str, key: str) -> list[str]:
        """Ids of the finished episodes that an application calls `key`."""
        return [id for (id,) in episodes_with_keys(self.rows, "id", app, [key], " ORDER BY id")]

    def key_counts(self, app: str, keys: Collection[str]) -> Mapping[str, int]:
        """The number of finished episodes with each of these keys of an application."""
        counted = episodes_with_keys(self.rows, "key, count(*)", app, keys, " GROUP BY key")
        return dict.fromkeys(keys, 0) | dict(counted)

    # Lists

    def call(self, call_id: str) -> CallRecord:
        """The call with this id. Raises RecordError if it is unknown or broken."""
        for call in self._read_calls("id = ?", (call_id,)):
            return call
        raise RecordError(f"No call {call_id!r} in {self._address} can be read.", "`cotune show RUN` lists episodes.")

    def stored_segments(self, segment_ids: Iterable[str]) -> set[str]:
        """The ids among `segment_ids` whose segments are stored."""
        stored: set[str] = set()
        for part in in_parts(segment_ids):
            marks = ",".join("?" * len(part))
            stored.update(id for (id,) in self.rows(f"SELECT id FROM segments WHERE id IN ({marks})", part))
        return stored

    def unfinished(self) -> list[str]:
        """Ids of episodes that have calls but no end: interrupted by a crash."""
        sql = f"SELECT episode FROM (SELECT DISTINCT episode FROM calls) AS found WHERE {NO_END} ORDER BY episode"
        return [episode for (episode,) in self.rows(sql)]

    def open_episodes(self, limit: int) -> list[tuple[str, int]]:
        """Ids of episodes without an end (under way, or interrupted), each with its number of calls. The newest come
        first."""
        rows = self.rows(
            f"""SELECT episode, n FROM (SELECT episode, count(*) AS n FROM calls GROUP BY episode) AS found
            WHERE {NO_END} ORDER BY episode DESC LIMIT ?""",
            (limit,),
        )
        return [(str(id), calls) for id, calls in rows]

    def episode_named(self, name: str) -> str:
        """The id of the episode that `name` stands for: the whole id, or its last letters. `name` itself if no episode
        matches. Raises RecordError if several ids end with it.
        """
        if self.has_episode(name):
            return name
        end = f"%{_escape_like(name)}"
        rows = self.rows(
            f"""SELECT id FROM episodes WHERE id {_LIKE}
            UNION SELECT episode FROM calls WHERE episode {_LIKE} ORDER BY 1""",
            (end, end),
        )
        # LIKE ignores the case of letters, so the ends of the ids are compared again.
        ids = [str(id) for (id,) in rows if str(id).endswith(name)]
        if len(ids) == 1:
            return ids[0]
        if not ids or name in ids:
            return name
        raise RecordError(f"{len(ids)} episodes end in {name!r}: {', '.join(ids[:3])}.", "Name one by all letters.")

    def has_episode(self, episode: str) -> bool:
        """Whether this episode has ended."""
        return bool(self.rows("SELECT 1 FROM episodes WHERE id = ?", (episode,)))

    def episode_ids(self, filters: EpisodeFilters, limit: int) -> list[str]:
        """Ids of the latest finished episodes that match, the newest first."""
        where, parameters = filters.where()
        sql = f"SELECT id FROM episodes {where} ORDER BY id DESC LIMIT ?"
        return [id for (id,) in self.rows(sql, (*parameters, limit))]

    def episode_lines(self, filters: EpisodeFilters, limit: int, order: str = "", start: int = 0) -> list[EpisodeLine]:
        """A page of the finished episodes that match: at most `limit`, after the first `start` ones. `order` is a key
        of `episode_filters.ORDERS`."""
        where, parameters = filters.where()
        _, order_in_sql = ORDERS[order]
        rows = self.rows(
            f"""SELECT id, task, phase, {_STEP}, status, calls, latency, error, {REPORTED},
                CASE WHEN {IS_OUTCOME} THEN 1 ELSE 0 END
            FROM episodes {where} ORDER BY {order_in_sql} LIMIT ? OFFSET ?""",
            (*parameters, limit, start),
        )
        return [EpisodeLine(*row) for row in rows]

    def inputs_and_answers(self, episodes: Iterable[str]) -> dict[str, tuple[Any, dict[str, Any] | None]]:
        """The input of the task and the message of the last answer, by episode. The last answer is the chosen candidate
        of the latest call that ended ok; None without one. Only these episodes are read."""
        inputs_and_answers: dict[str, tuple[Any, dict[str, Any] | None]] = {}
        sql = f"""SELECT episodes.id, episodes.body, calls.body, calls.candidates
            FROM episodes LEFT JOIN calls ON calls.id = (
                SELECT latest.id FROM calls AS latest
                WHERE latest.episode = episodes.id AND latest.status = 'ok' AND latest.drawn > 0
                ORDER BY latest.step DESC LIMIT 1)
            WHERE episodes.id {AMONG}"""
        for id, episode_body, call_body, candidates in self.rows(sql, (NameList.of(episodes),)):
            # Broken JSON is read as an episode without a task, or a call without an answer.
            episode = _decode_json(episode_body, _EpisodeTask, None)
            task_input = episode.task.input if episode else None
            chosen_index = _decode_json(call_body, _ChosenIndex, _ChosenIndex()).chosen
            message = None
            for answer in _decode_json(candidates, list[_Answer], []):
                if answer.index == chosen_index:
                    message = answer.message
                    if not message.get("content"):
                        message = {**message, "content": answer.text}
            inputs_and_answers[str(id)] = (task_input, message)
        return inputs_and_answers

    def call_ids(self, before: str, limit: int) -> list[str]:
        """Ids of the latest calls below an id, empty for all; the newest first."""
        if before:
            rows = self.rows("SELECT id FROM calls WHERE id < ? ORDER BY id DESC LIMIT ?", (before, limit))
        else:
            rows = self.rows("SELECT id FROM calls ORDER BY id DESC LIMIT ?", (limit,))
        return [id for (id,) in rows]

    def call_lines(self, calls: Sequence[str], filters: CallFilters) -> list[CallLine]:
        """The calls among `calls` that match the filters, the newest first."""
        where, parameters = filters.where()
        is_wanted = f"calls.id {AMONG}"
        condition = f"{where} AND {is_wanted}" if where else f"WHERE {is_wanted}"
        rows = self.rows(
            f"""SELECT calls.id, episode, step, role, turn, calls.status, task, phase, {_STEP},
                prompt_tokens, completion_tokens, calls.latency, coalesce(policy || '@' || version, model)
            FROM calls LEFT JOIN episodes ON episodes.id = calls.episode
            {condition} ORDER BY calls.id DESC""",
            (*parameters, NameList.of(calls)),
        )
        return [CallLine(*row) for row in rows]

    def episode_count(self, filters: EpisodeFilters) -> int:
        """The number of finished episodes that match."""
        where, parameters = filters.where()
        return int(self.rows(f"SELECT count(*) FROM episodes {where}", parameters)[0][0])

    def neighbours(self, episode: str) -> tuple[str, str]:
        """Ids of the episodes before and after one; empty at the ends."""
        sql = "SELECT (SELECT max(id) FROM episodes WHERE id < ?), (SELECT min(id) FROM episodes WHERE id > ?)"
        older, newer = self.rows(sql, (episode, episode))[0]
        return older or "", newer or ""

    def phases(self) -> list[str]:
        """Phases that have episodes."""
        return [phase for (phase,) in self.rows("SELECT DISTINCT phase FROM episodes ORDER BY 1")]

    def steps(self, phase: str) -> list[int]:
        """Training steps that have episodes of a phase."""
        sql = f"""SELECT DISTINCT {_STEP} FROM episodes
            WHERE phase = ? AND training_step IS NOT NULL AND {COUNTED} ORDER BY 1"""
        return [step for (step,) in self.rows(sql, (phase,))]

    def recent_roles(self) -> list[str]:
        """Roles of the latest thousand calls."""
        sql = "SELECT DISTINCT role FROM (SELECT role FROM calls ORDER BY rowid DESC LIMIT 1000) AS latest ORDER BY 1"
        return [str(role) for (role,) in self.rows(sql)]

    def first_episodes(self, phase: str, step: int | None, tasks: Iterable[str]) -> dict[str, str]:
        """The first episode of each of these tasks in a training step, by task."""
        rows = self.rows(
            f"""SELECT task, min(id) FROM episodes
            WHERE phase = ? AND training_step {"IS NULL" if step is None else "= ?"} AND {COUNTED}
            AND task {AMONG} GROUP BY task""",
            (phase, *([] if step is None else [step]), NameList.of(tasks)),
        )
        return {str(task): str(id) for task, id in rows}

    def repeated_tasks(self, phase: str, limit: int) -> list[tuple[str, int, int]]:
        """Tasks with episodes in several steps, each with its first and last step; the furthest apart first."""
        return self.rows(
            f"""SELECT task, earliest, latest FROM (
                SELECT task, min(training_step) AS earliest, max(training_step) AS latest FROM episodes
                WHERE phase = ? AND {COUNTED} AND training_step >= 0 GROUP BY task) AS found
            WHERE earliest < latest ORDER BY latest - earliest DESC, task LIMIT ?""",
            (phase, limit),
        )

    def call_times(self, episode: str) -> list[CallTime]:
        """The calls of an episode in step order."""
        sql = """SELECT id, step, role, turn, status, started, latency, body
            FROM calls WHERE episode = ? ORDER BY step, id"""
        times: list[CallTime] = []
        for id, step, role, turn, status, started, seconds, body in self.rows(sql, (episode,)):
            parents = tuple(map(str, _list_field(body, "parents")))
            times.append(CallTime(id, step, role, turn, status, started, seconds, parents))
        return times

    def messages_of(self, episode: str, role: str, turn: int) -> list[str]:
        """Ids of the messages of a role's prompt in a turn."""
        sql = "SELECT body FROM calls WHERE episode = ? AND role = ? AND turn = ?"
        rows = self.rows(sql, (episode, role, turn))
        return _list_field(rows[0][0], "messages") if rows else []

    # Search

    def episodes_with_text(
        self, text: str, episodes: Sequence[str], text_in_message: dict[str, bool]
    ) -> dict[str, str]:
        """Search a text in episodes: in messages, answers, errors, feedback and the task's input.

        Returns the ids of the episodes that have it, each with the id of a call that has it. The id of the call is
        empty if the text is in the episode's own fields or feedback. `text_in_message` says whether a message has the
        text, for messages that were searched: pass the same dictionary in the next search for this text.
        """
        names = NameList.of(episodes)
        wanted = _ascii_lower(text)
        json_pattern, plain_pattern = _patterns(text)
        call_of_episode: dict[str, str] = {}

        # 1. The episodes themselves. LIKE also finds keys in their JSON, so the values are searched again.
        sql = f"SELECT id, body FROM episodes WHERE id {AMONG} AND body {_LIKE}"
        for id, body in self.rows(sql, (names, json_pattern)):
            if _json_holds(body, wanted):
                call_of_episode[str(id)] = ""

        # 2. Feedback on the episodes.
        for (id,) in self.rows(f"{_FEEDBACK_TARGETS} {AMONG}", (plain_pattern, names)):
            call_of_episode[str(id)] = ""

        # 3. The calls of the other episodes.
        calls = self._search_calls(text, "episode", episodes, text_in_message, finished=call_of_episode)
        for episode, call in calls:
            call_of_episode.setdefault(episode, call)  # the first call is enough
        return call_of_episode

    def calls_with_text(self, text: str, calls: Sequence[str], text_in_message: dict[str, bool]) -> set[str]:
        """The calls among `calls` that have a text in a message, an answer, an error or feedback. For
        `text_in_message` see `episodes_with_text`."""
        return {call for _, call in self._search_calls(text, "id", calls, text_in_message)}

    def _search_calls(
        self,
        text: str,
        column: Literal["id", "episode"],
        ids: Sequence[str],
        text_in_message: dict[str, bool],
        finished: Container[str] = (),
    ) -> Iterator[tuple[str, str]]:
        """Search a text in calls. Yields the episode and the id of each call that has it.

        `ids` are the ids of the calls to search, or with `column` "episode", of their episodes. Then one call of each
        episode is enough, and the episodes in `finished` are not searched. Calls with the text in an answer, an error
        or feedback come before the calls with it in a message.
        """
        names = NameList.of(ids)
        wanted = _ascii_lower(text)
        json_pattern, plain_pattern = _patterns(text)

        # 1. Feedback. It is given to candidates, whose ids are the call's id, "." and a number.
        feedback = f"{_FEEDBACK_TARGETS} > calls.id || '.' AND target < calls.id || '/'"
        sql = f"SELECT id FROM calls WHERE {column} {AMONG} AND EXISTS ({feedback})"
        calls_with_feedback_hit = {id for (id,) in self.rows(sql, (names, plain_pattern))}

        # 2. Errors and answers. SQL searches the JSON texts, which is quick but also finds keys. Then the values of the
        #    hits are searched.
        sql = f"""SELECT episode, id, body, CASE WHEN candidates {_LIKE} THEN candidates END FROM calls
            WHERE {column} {AMONG} ORDER BY episode, step"""
        messages_of_calls: dict[tuple[str, str], Sequence[str]] = {}
        episodes_with_hit: set[str] = set()
        for episode, id, body, answers in self.rows(sql, (json_pattern, names)):
            if column == "episode" and (episode in finished or episode in episodes_with_hit):
                continue
            call = _decode_json(body, _SearchedCall, _SearchedCall())
            is_hit = id in calls_with_feedback_hit or wanted in _ascii_lower(call.error or "")
            if not is_hit and answers:
                is_hit = _json_holds(answers, wanted)
            if is_hit:
                episodes_with_hit.add(episode)
                yield str(episode), str(id)
            else:
                messages_of_calls[str(episode), str(id)] = call.messages

        # 3. The messages of the other calls.
        if column == "episode":
            for episode, call_id in list(messages_of_calls):
                if episode in episodes_with_hit:
                    del messages_of_calls[episode, call_id]
        message_ids: set[str] = set()
        for messages in messages_of_calls.values():
            message_ids.update(messages)
        self._search_messages(message_ids - text_in_message.keys(), wanted, json_pattern, text_in_message)
        for (episode, call_id), messages in messages_of_calls.items():
            if any(text_in_message[message] for message in messages):
                yield episode, call_id

    def _search_messages(
        self, ids: Iterable[str], wanted: str, json_pattern: str, text_in_message: dict[str, bool]
    ) -> None:
        """Search a text in messages, and enter in `text_in_message` whether each has it. `wanted` is the text in lower
        case, and `json_pattern` its pattern for LIKE."""
        for part in in_parts(ids):
            marks = ",".join("?" * len(part))
            sql = f"SELECT id, body FROM messages WHERE id IN ({marks}) AND body {_LIKE}"
            text_in_message.update(dict.fromkeys(part, False))
            for id, body in self.rows(sql, (*part, json_pattern)):
                text_in_message[id] = _json_holds(body, wanted)


def _patterns(text: str) -> tuple[str, str]:
    """Two patterns of LIKE for a text: as it is written in JSON, and as it is."""
    in_json = json.dumps(text, ensure_ascii=False)[1:-1]  # without the quotation marks
    return f"%{_escape_like(in_json)}%", f"%{_escape_like(text)}%"


def _decode_json(text: Any, kind: type[T], otherwise: Default) -> T | Default:
    """The value of a column with JSON; `otherwise` if it is broken."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, TypeError, RecursionError):
        return otherwise


def _list_field(body: Any, name: str) -> list[Any]:
    """A field of a record that should be a list; empty otherwise."""
    value = _decode_json(body, dict[str, Any], {}).get(name)
    return value if isinstance(value, list) else []


def _json_holds(body: Any, wanted: str) -> bool:
    """Whether a column with JSON holds a text in its values. Keys do not count."""
    return _value_holds(_decode_json(body, Any, None), wanted)


def _value_holds(value: Any, wanted: str) -> bool:
    """Whether any text in a JSON value has `wanted` in it, in lower case. Keys are not searched, nor are texts under
    the keys in `_NOT_SEARCHED`."""
    if isinstance(value, str):
        return wanted in _ascii_lower(value)
    if isinstance(value, list):
        return any(_value_holds(item, wanted) for item in value)
    if not isinstance(value, dict):
        return False
    for key, item in value.items():
        is_ignored = key in _NOT_SEARCHED and isinstance(item, str)
        if not is_ignored and _value_holds(item, wanted):
            return True
    return False


def _ascii_lower(text: str) -> str:
    """The text with its ASCII letters in lower case: LIKE ignores only their case."""
    return text.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")


def _escape_like(text: str) -> str:
    """A text in which the characters that LIKE treats as patterns stand for themselves."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
