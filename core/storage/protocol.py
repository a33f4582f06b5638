"""The store protocol: where records go and how they are read back. One contract test suite holds all stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from cotune.records.structs import CallRecord, Episode, Record
from cotune.storage.episode_filters import EpisodeFilters


class Store(Protocol):
    """Keeps records. Writing never blocks or breaks the application; reading never blocks writing."""

    @property
    def address(self) -> str:
        """Where the records are, for people and for `open_store`."""
        ...

    @property
    def folder(self) -> Path:
        """The folder that holds, or would hold, the other files of the run."""
        ...

    def write(self, records: Sequence[Record]) -> None:
        """Queue records, in order, to be committed together. The first of an id stands, but that an episode may be
        written again as cancelled or abandoned, which withdraws it. Never raises for a full disk: see `lost`."""
        ...

    def flush(self) -> None:
        """Return when everything queued before is durable (or counted in `lost`)."""
        ...

    @property
    def lost(self) -> int:
        """Records that could not be stored, since the store was opened."""
        ...

    @property
    def unreadable(self) -> int:
        """Broken rows that were left out of what was read, since the store was opened."""
        ...

    @property
    def refused(self) -> int:
        """Rewards refused as their groups had been trained on, since the store was opened."""
        ...

    def episodes(
        self, *, phase: str | None = None, training_step: int | None = None, task: str | None = None
    ) -> Iterator[Episode]:
        """Finished episodes in id order (= start order)."""
        ...

    def episode(self, episode_id: str) -> Episode:
        """Raises RecordError when unknown."""
        ...

    def calls(self, episode_id: str) -> list[CallRecord]:
        """Calls of an episode in step order; also of an episode that never finished."""
        ...

    def message(self, message_id: str) -> Any:
        """Body of a message, with its images as they were sent; of a tools list, or a grammar."""
        ...

    def image(self, image_id: str) -> bytes:
        """The encoded bytes of an image of a message, by their SHA-256. Raises RecordError when unknown."""
        ...

    def token_ids(self, segment_id: str) -> tuple[int, ...]:
        """All token ids on the path from the root to this segment."""
        ...

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        """Target -> component name -> value (last write wins)."""
        ...

    def unfinished(self) -> Iterator[str]:
        """Ids of episodes that have calls but no end: interrupted by a crash."""
        ...

    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        """Mark groups as trained; later rewards for their candidates (a mapping names them) are refused and counted."""
        ...

    def consumed(self) -> Mapping[str, int]:
        """Group id -> training step that consumed it."""
        ...

    def counters(self) -> Mapping[str, int]:
        """`lost` and `refused` over the life of the store, whoever wrote to it."""
        ...

    def success_counts(self, episodes: Iterable[str] | None = None) -> list[tuple[str, int, int]]:
        """Phase, solved episodes and episodes that count, for each phase in which an episode reports `success`.
        With `episodes`, of these ids alone."""
        ...

    def outcome_means(self, on_failure: str) -> list[tuple[str, str, float | None, int]]:
        """Phase, name, mean and number of episodes of each component of outcomes; failed episodes count as
        `on_failure` says."""
        ...

    def episodes_by_phase(self) -> list[tuple[Any, ...]]:
        """Phase, episodes, those that ended ok, error, cancelled, abandoned, tasks, steps, mean seconds; phases in the
        order of their first episodes."""
        ...

    def calls_by_role(self) -> list[tuple[Any, ...]]:
        """Role, calls, failed ones, turns, candidates, tokens of prompts and of answers, mean seconds; roles in the
        order of their first calls."""
        ...

    def rewards_by_role(self) -> list[tuple[str, str, float]]:
        """Role, name and mean of the rewards of candidates."""
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

    def open_episodes(self, limit: int) -> list[tuple[str, int]]:
        """Episodes without an end, the newest first, each with its number of calls: under way, or interrupted."""
        ...

    def episode_ids(self, filters: EpisodeFilters, limit: int) -> list[str]:
        """Ids of the latest finished episodes that fit, the newest first."""
        ...

    def episode_count(self, filters: EpisodeFilters) -> int:
        """How many finished episodes fit."""
        ...

    def has_scored_candidates(self) -> bool:
        """Whether several candidates of one call have rewards of their own."""
        ...

    def rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT."""
        ...

    def close(self) -> None:
        """Flush and give the records back; safe to call twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
