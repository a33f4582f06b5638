"""What every store can do: keep records and give them back. One contract test suite holds all stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cotune.errors import RecordError, RunError
from cotune.records.structs import CallRecord, Episode, Record
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters

if TYPE_CHECKING:
    from cotune.storage.sql.figures import Figures


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """What has gone wrong since a store was opened. `Store.counters` counts over its life."""

    failing: bool = False
    """The disk or the server did not take the last transaction, so records wait."""
    lost: int = 0
    """Records that could not be stored."""
    unreadable: int = 0
    """Broken rows that reads have left out."""
    refused: int = 0
    """Rewards refused because their groups had been trained on."""
    foreign: int = 0
    """Records left out because they belong to an episode of another application. The first application that writes for
    an episode owns it; records without an application are never left out."""


class Store(ABC):
    """Keeps records. Writing never blocks or breaks the application; reading never blocks writing, and sees what is
    committed: `flush` first to read your own latest writes."""

    address: str
    """Where the records are, for people and for `open_store`."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """The folder that holds, or would hold, the other files of the run; None for a database."""

    @property
    @abstractmethod
    def health(self) -> StoreHealth:
        """What has gone wrong since the store was opened."""

    # Writing

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Queue records, in order, to be committed together. The first of an id stands, but that an episode may be
        written again as cancelled, which withdraws it. Never raises for a full disk: see `health`."""

    @abstractmethod
    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        """Write records, add to counters of the store, and return when both are durable; other threads may share the
        transaction. Return the records that were left out, by the counter that counts them (`lost`, `refused`,
        `foreign`). Raises RunError when they are not durable: send them again, as what is stored is not stored
        twice."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything queued before is durable (or counted in `health.lost`)."""

    # Reading

    @abstractmethod
    def episodes(self, filters: EpisodeFilters = EVERYTHING) -> Iterator[Episode]:
        """Finished episodes that fit, in id order (= start order), a page at a time."""

    @abstractmethod
    def calls(
        self, episode_id: str, *, start: int = 0, limit: int | None = None, lean: bool = False
    ) -> list[CallRecord]:
        """Calls of an episode in step order, from number `start` on, at most `limit`; also of an episode that never
        finished. With `lean`, candidates have little more than the lengths of their token ids, to save memory."""

    @abstractmethod
    def bodies(self, ids: Iterable[str]) -> Mapping[str, Any]:
        """What content addresses stand for: bodies of messages with their images as they were sent, lists of tools,
        grammars; and of an image, whose id is the SHA-256 of its encoded bytes, these bytes. What is not there, or is
        broken, is left out."""

    @abstractmethod
    def token_ids(self, segment_id: str) -> tuple[int, ...]:
        """All token ids on the path from the root to this segment."""

    @abstractmethod
    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        """Target -> component name -> value (the latest by its time, then the last write, wins)."""

    @abstractmethod
    def feedback(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        """Target -> name of the reward -> the text beside it. A text goes with its reward when that is replaced."""

    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """`lost`, `refused` and `foreign` over the life of the store, whoever wrote to it, and what applications told
        a collector: records that they had to drop (`dropped`), and calls that sampling rates left out (`sampled`)."""

    def figures(self) -> Figures:
        """Counts, lists and searches, which need SQL. Raises RunError if the store does not speak SQL."""
        cause = f"{self.address} can be trained from, but it answers no queries, which this needs."
        raise RunError(cause, "Keep the records in SQLite or PostgreSQL.")

    # The ledger of groups that were trained on

    @abstractmethod
    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        """Mark groups as trained, durably: later rewards for them are refused and counted in `refused`.

        A mapping names the candidates of each group; then their rewards and their episodes' rewards are refused. A
        group without members that is named by a call id or candidate id stands for that call or candidate. The first
        step that consumed a group stays. Raises RecordError when the ledger cannot be written.
        """

    @abstractmethod
    def release(self, training_step: int) -> None:
        """Forget, durably, what this training step and later ones have consumed: they are trained again."""

    @abstractmethod
    def consumed(self) -> Mapping[str, int]:
        """Group id -> training step that consumed it, looked up as it is asked."""

    @abstractmethod
    def close(self) -> None:
        """Flush and give the records back; safe to call twice."""

    # Made of the above, for every store alike

    def episode(self, episode_id: str) -> Episode:
        """A finished episode. Raises RecordError when it is unknown or broken."""
        for episode in self.episodes(EpisodeFilters(ids=(episode_id,))):
            return episode
        cause = f"No finished episode {episode_id!r} in {self.address} can be read."
        raise RecordError(cause, "`cotune show RUN` lists them.")

    def message(self, message_id: str) -> Any:
        """The body of a message, a list of tools or a grammar. Raises RecordError when it is unknown or broken."""
        return self._body("message", message_id)

    def image(self, image_id: str) -> bytes:
        """The encoded bytes of an image. Raises RecordError when it is unknown or broken."""
        data: bytes = self._body("image", image_id)
        return data

    def _body(self, kind: str, id: str) -> Any:
        bodies = self.bodies((id,))
        if id not in bodies:
            cause = f"No {kind} {id!r} in {self.address} can be read."
            raise RecordError(cause, "It was redacted, or is among the `lost` records, or its row is broken.")
        return bodies[id]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
