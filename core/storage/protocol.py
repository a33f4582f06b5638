"""The store protocol: where records go and how they are read back. One contract test suite holds all stores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from cotune.records.structs import CallRecord, Episode, Record
from cotune.storage.episode_filters import EVERYTHING, CallFilters, EpisodeFilters


class Store(Protocol):
    """Keeps records. Writing never blocks or breaks the application; reading never blocks writing."""

    @property
    def address(self) -> str:
        """Where the records are, for people and for `open_store`."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder that holds, or would hold, the other files of the run; None for a database."""
        ...

    def write(self, records: Sequence[Record]) -> None:
        """Queue records, in order, to be committed together. The first of an id stands, but that an episode may be
        written again as cancelled, which withdraws it. Never raises for a full disk: see `lost`."""
        ...

    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        """Write records, add to counters of the store, and return when both are durable; other threads may share the
        transaction. Return the records that were left out, by the counter that counts them (`lost`, `refused`,
        `foreign`). Raises RunError when they are not durable: send them again, as what is stored is not stored
        twice."""
        ...

    def flush(self) -> None:
        """Return when everything queued before is durable (or counted in `lost`)."""
        ...

    @property
    def failing(self) -> bool:
        """Whether the disk or the server did not take the last transaction, so that records wait."""
        ...

    @property
    def lost(self) -> int:
        """Records that could not be stored, since the store was opened."""
        ...

    @property
    def unreadable(self) -> int:
        """Broken rows that reads have left out since the store was opened."""
        ...

    @property
    def refused(self) -> int:
        """Rewards refused as their groups had been trained on, since the store was opened."""
        ...

    @property
    def foreign(self) -> int:
        """Records left out as they belong to an episode of another application, since the store was opened. The first
        application that writes for an episode owns it; records without one are never left out."""
        ...

    def episodes(
        self,
        *,
        phase: str | None = None,
        training_step: int | None = None,
        task: str | None = None,
        filters: EpisodeFilters = EVERYTHING,
    ) -> Iterator[Episode]:
        """Finished episodes in id order (= start order), a page at a time."""
        ...

    def episode(self, episode_id: str) -> Episode:
        """Raises RecordError when unknown."""
        ...

    def calls(
        self, episode_id: str, *, start: int = 0, limit: int | None = None, lean: bool = False
    ) -> list[CallRecord]:
        """Calls of an episode in step order, from number `start` on, at most `limit`; also of an episode that never
        finished. With `lean`, candidates have little more than the lengths of their token ids, to save memory."""
        ...

    def call(self, call_id: str) -> CallRecord:
        """Raises RecordError when unknown."""
        ...

    def message(self, message_id: str) -> Any:
        """Body of a message, with its images as they were sent; of a tools list, or a grammar."""
        ...

    def image(self, image_id: str) -> bytes:
        """The encoded bytes of an image of a message, by their SHA-256. Raises RecordError when unknown."""
        ...

    def stored_segments(self, segment_ids: Iterable[str]) -> set[str]:
        """Those of these segments that are stored."""
        ...

    def token_ids(self, segment_id: str) -> tuple[int, ...]:
        """All token ids on the path from the root to this segment."""
        ...

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        """Target -> component name -> value (the latest by its time, then the last write, wins)."""
        ...

    def feedback(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        """Target -> name of the reward -> the text beside it. A text goes with its reward when that is replaced."""
        ...

    def marks(self) -> tuple[int, int]:
        """Numbers of the last episode and the last reward that are stored: what comes later has higher ones."""
        ...

    def unfinished(self) -> Iterator[str]:
        """Ids of episodes that have calls but no end: interrupted by a crash."""
        ...

    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        """Mark groups as trained, durably: later rewards for them are refused and counted in `refused`.

        A mapping names the candidates of each group; then their rewards and their episodes' rewards are refused. A
        group without members that is named by a call id or candidate id stands for that call or candidate. The first
        step that consumed a group stays. Raises RecordError when the ledger cannot be written.
        """
        ...

    def release(self, training_step: int) -> None:
        """Forget, durably, what this training step and later ones have consumed: they are trained again."""
        ...

    def consumed(self) -> Mapping[str, int]:
        """Group id -> training step that consumed it, looked up as it is asked."""
        ...

    def counters(self) -> Mapping[str, int]:
        """`lost`, `refused` and `foreign` over the life of the store, whoever wrote to it, and what applications told
        a collector: records that they had to drop (`dropped`), and calls that sampling rates left out (`sampled`)."""
        ...

    # Outcomes; failed episodes count as `on_failure` says

    def success_counts(self, episodes: Iterable[str] | None = None) -> list[tuple[str, int, int, int]]:
        """Phase, solved episodes, episodes that count, and the sum over tasks of the square of their number, for each
        phase in which an episode reports `success`. With `episodes`, of these ids alone."""
        ...

    def outcome_means(self, on_failure: str) -> list[tuple[str, str, float | None, int]]:
        """Phase, name, mean and number of episodes of each component of outcomes."""
        ...

    def outcomes_by_task(self, phase: str, on_failure: str) -> tuple[str, list[tuple[Any, ...]]]:
        """`success` where an episode of the phase reports it, else `reward`, the sum of the components; and by task:
        its id, episodes, and the mean, lowest and highest of this outcome."""
        ...

    def outcomes_by_step(self, phase: str, on_failure: str, tasks: Iterable[str]) -> list[tuple[Any, ...]]:
        """Of these tasks in each training step: task, step, episodes with an outcome, and the sum of their outcomes."""
        ...

    def has_scored_candidates(self) -> bool:
        """Whether several candidates of one call have rewards of their own."""
        ...

    def rewards_by_role(self) -> list[tuple[str, str, float]]:
        """Role, name and mean of the rewards of candidates."""
        ...

    # Counts

    def cut_feedback(self) -> int:
        """Texts beside rewards that were too long and are not whole."""
        ...

    def counts(self) -> tuple[int, int]:
        """Episodes and calls."""
        ...

    def newest(self) -> tuple[int, int]:
        """Numbers that grow with each call and each episode."""
        ...

    def episodes_by_phase(self) -> list[tuple[Any, ...]]:
        """Phase, episodes, those that ended ok, error, cancelled, tasks, steps, mean seconds; phases in the order of
        their first episodes."""
        ...

    def use(self, after: int) -> tuple[int, list[tuple[Any, ...]]]:
        """Of calls above a number of `newest`, 0 for all: the highest number among them, or `after`; and role, model,
        calls, failed ones, turns, tokens of prompts and of answers, seconds, candidates; roles in the order of their
        first calls."""
        ...

    def models_asked(self, app: str = "") -> list[tuple[str, str]]:
        """Role and model name of the application's calls, each pair once: not of judges, nor of calls that proposed
        prompts. Of one application alone, or all."""
        ...

    def failed_episodes(self) -> list[tuple[str, str | None, int]]:
        """Phase, error and number of failed episodes, the commonest first."""
        ...

    def failed_calls(self) -> list[tuple[str, str, int]]:
        """Role, status and number of failed calls."""
        ...

    def answered_by(self, policy: str) -> list[tuple[str, int]]:
        """By role, how many calls this policy answered."""
        ...

    # Lists

    def open_episodes(self, limit: int) -> list[tuple[str, int]]:
        """Episodes without an end, the newest first, each with its number of calls: under way, or interrupted."""
        ...

    def episode_named(self, name: str) -> str:
        """The id of the episode that `name` is, or is the end of; `name` itself where there is none.

        Raises RecordError where several end so.
        """
        ...

    def has_episode(self, episode: str) -> bool:
        """Whether this episode has ended."""
        ...

    def episode_ids(self, filters: EpisodeFilters, limit: int) -> list[str]:
        """Ids of the latest finished episodes that fit, the newest first."""
        ...

    def episode_lines(
        self, filters: EpisodeFilters, limit: int, order: str = "", start: int = 0
    ) -> list[tuple[Any, ...]]:
        """The same episodes, in an order of `episode_filters.ORDERS` and without the first `start`: id, task, phase,
        training step, status, calls, seconds, error, and whether it reports that it solved its task."""
        ...

    def inputs_and_answers(self, episodes: Iterable[str]) -> dict[str, tuple[Any, dict[str, Any] | None]]:
        """By episode, the input of its task and the message of its last answer, None without one: the chosen candidate
        of its latest call that ended ok. Nothing of other episodes is read."""
        ...

    def call_ids(self, before: str, limit: int) -> list[str]:
        """Ids of the latest calls below an id, empty for all; the newest first."""
        ...

    def call_lines(self, calls: Sequence[str], filters: CallFilters) -> list[tuple[Any, ...]]:
        """Those of some calls that fit, the newest first: id, episode, step, role, turn, status, task, phase, training
        step, tokens of prompt and of answers, seconds, policy or model."""
        ...

    def episode_count(self, filters: EpisodeFilters) -> int:
        """How many finished episodes fit."""
        ...

    def neighbours(self, episode: str) -> tuple[str, str]:
        """Ids of the episodes before and after one; empty at the ends."""
        ...

    def phases(self) -> list[str]:
        """Phases that have episodes."""
        ...

    def steps(self, phase: str) -> list[int]:
        """Training steps that have episodes of a phase."""
        ...

    def recent_roles(self) -> list[str]:
        """Roles of the latest thousand calls."""
        ...

    def first_episodes(self, phase: str, step: int | None, tasks: Iterable[str]) -> dict[str, str]:
        """The first episode of each of these tasks in a training step, by task."""
        ...

    def repeated_tasks(self, phase: str, limit: int) -> list[tuple[str, int, int]]:
        """Tasks with episodes in several steps, and the first and the last of these; the furthest apart first."""
        ...

    def call_times(self, episode: str) -> list[tuple[Any, ...]]:
        """Of each call of an episode: id, step, role, turn, status, start, seconds, parents."""
        ...

    def messages_of(self, episode: str, role: str, turn: int) -> list[str]:
        """Ids of the messages of a role's prompt in a turn."""
        ...

    def holding(self, text: str, episodes: Sequence[str], verdicts: dict[str, bool]) -> dict[str, str]:
        """Those of some episodes in which a message, an answer, an error, feedback or the task's input holds a text,
        each with a call that does, empty where none needs to. `verdicts` remembers, from one search to the next for the
        same text, which messages do."""
        ...

    def calls_holding(self, text: str, calls: Sequence[str], verdicts: dict[str, bool]) -> set[str]:
        """Those of some calls in which a message, an answer, an error or feedback holds a text."""
        ...

    # Upkeep

    def tally(self, app: str = "") -> list[tuple[Any, ...]]:
        """By application, day, role and policy: application, role, policy, version, day, calls, failed ones, tokens of
        prompts and of answers; of one application alone, or all."""
        ...

    def apps(self) -> list[tuple[Any, ...]]:
        """Applications: name, episodes, those that ended ok, calls, first and last start, episodes with a reward."""
        ...

    def episodes_with_key(self, app: str, key: str) -> list[str]:
        """Ids of the finished episodes that an application calls `key`."""
        ...

    def key_counts(self, app: str, keys: Collection[str]) -> Mapping[str, int]:
        """How many finished episodes an application calls by each of these keys."""
        ...

    def prune(self, before: float, *, app: str = "", keep_trained: bool = False) -> Iterator[Mapping[str, int]]:
        """Delete what started before a time, and the messages that nothing else names; yield the numbers of rows of
        each transaction by table. Episodes that a run was trained on may be kept."""
        ...

    def delete(self, episodes: Iterable[str], key: tuple[str, str] | None = None) -> Mapping[str, int]:
        """Delete episodes with all that belongs to them alone, and the rewards of an application and its key; return
        the numbers of rows by table. All calls are looked through for messages that others share."""
        ...

    def having(self, table: str, ids: Iterable[str]) -> set[str]:
        """Those of some ids that a table has."""
        ...

    def size(self, table: str) -> int:
        """Rows of a table."""
        ...

    def page(self, table: str, after: Sequence[Any], limit: int, *, keys_only: bool = False) -> list[tuple[Any, ...]]:
        """Rows of a table after a key, in the order of keys; or their keys alone."""
        ...

    def rows_of(self, table: str, ids: Iterable[str]) -> list[tuple[Any, ...]]:
        """Rows of a table by their ids."""
        ...

    def load(self, table: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Add rows of another store, also for targets that take no rewards any more; return how many could not be
        stored."""
        ...

    def take_counters(self, source: str, counters: Mapping[str, int]) -> None:
        """Count what the store at the address `source` has counted as well, in place of what was taken from it
        before."""
        ...

    def pause(self) -> bool:
        """Flush, and let other processes write, without closing the store: until `resume` this one neither writes nor
        is asked to. Return whether that was possible; if not, close the store."""
        ...

    def resume(self) -> bool:
        """Write again after `pause`. Return whether the store is as this process left it; if not, close it and open it
        again. Raises RunError while another process writes."""
        ...

    def close(self) -> None:
        """Flush and give the records back; safe to call twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
