"""The interface of every store: keep records and give them back. One contract test suite checks all stores."""

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
    """Problems since a store was opened. `Store.counters` counts over the life of the store."""

    failing: bool = False
    """The disk or the server rejected the last transaction, so records wait in memory."""
    lost: int = 0
    """Records that could not be stored."""
    unreadable: int = 0
    """Broken rows that reads have skipped."""
    refused: int = 0
    """Rewards refused because their groups had already been trained on."""
    foreign: int = 0
    """Records left out because they belong to an episode of another application. The first application that writes for
    an episode owns it; records without an application are never left out."""


class Store(ABC):
    """Keeps records. Writing never blocks or breaks the application. Reading never blocks writing, and sees only
    committed records: call `flush` first to read your own latest writes."""

    address: str
    """The place of the records, for people and for `open_store`."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """The folder that holds, or would hold, the other files of the run; None for a database."""

    @property
    @abstractmethod
    def health(self) -> StoreHealth:
        """Problems since the store was opened."""

    # Writing

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Queue records, in order, to be committed together. If an id is written twice, the first record stays. The
        exception is an episode, which can be written again as cancelled; this withdraws it. Never raises for a full
        disk: see `health`."""

    @abstractmethod
    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        """Write records, add to counters of the store, and return when both are durable. Other threads may share the
        transaction. Returns the records that were left out, by the name of their counter (`lost`, `refused`,
        `foreign`). Raises RunError when the records are not durable. Send them again then: the store never keeps a
        record twice."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything queued before is durable (or counted in `health.lost`)."""

    # Reading

    @abstractmethod
    def episodes(self, filters: EpisodeFilters = EVERYTHING) -> Iterator[Episode]:
        """Finished episodes that match the filters, in id order (= start order), a page at a time."""

    @abstractmethod
    def calls(
        self, episode_id: str, *, start: int = 0, limit: int | None = None, lean: bool = False
    ) -> list[CallRecord]:
        """Calls of an episode in step order, from number `start` on, at most `limit`. An episode that never finished
        has calls too. With `lean`, candidates keep little more than the lengths of their token ids, to save memory."""

    @abstractmethod
    def bodies(self, ids: Iterable[str]) -> Mapping[str, Any]:
        """The contents of content addresses: bodies of messages with their images as they were sent, lists of tools,
        and grammars. The content of an image, whose id is the SHA-256 of its encoded bytes, is these bytes. Missing
        and broken contents are left out."""

    @abstractmethod
    def token_ids(self, segment_id: str) -> tuple[int, ...]:
        """All token ids on the path from the root to this segment."""

    @abstractmethod
    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        """Target -> component name -> value. The value with the latest time wins; at equal times, the last write."""

    @abstractmethod
    def feedback(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        """Target -> name of the reward -> the text given with it. When a reward is replaced, so is its text."""

    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """`lost`, `refused` and `foreign` over the life of the store, for all its writers. Applications report two
        more to a collector: records that they had to drop (`dropped`), and calls that sampling rates left out
        (`sampled`)."""

    def figures(self) -> Figures:
        """Counts, lists and searches, which need SQL. Raises RunError if the store does not speak SQL."""
        cause = f"{self.address} can be used for training, but it cannot answer the queries that this command needs."
        raise RunError(cause, "Keep the records in SQLite or PostgreSQL.")

    # The ledger of groups that were trained on

    @abstractmethod
    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        """Mark groups as trained, durably: later rewards for them are refused and counted in `refused`.

        A mapping names the candidates of each group; then rewards for these candidates and for their episodes are
        refused. A group without members whose name is the id of a call or candidate stands for it. The first step that
        consumed a group stays. Raises RecordError when the ledger cannot be written.
        """

    @abstractmethod
    def release(self, training_step: int) -> None:
        """Forget, durably, which groups this training step and later ones have consumed: they are trained again."""

    @abstractmethod
    def consumed(self) -> Mapping[str, int]:
        """Group id -> training step that consumed it. Each lookup queries the store."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release the records; safe to call twice."""

    # Built from the methods above, the same for every store

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
