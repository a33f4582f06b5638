"""The rows that are learned from records, by policy and episode. They are tokenized once and stored packed in a file,
because there may be more than memory holds."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.chat.template import ChatTemplate

FEWEST = 10
"""If there are fewer tasks than this, none is held out."""
HELD_OUT = 0.1
"""Share of the tasks that are held out. A few tasks are enough to see when their loss rises."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrainRow]).decode


class Reader(NamedTuple):
    """How the answers of a role become rows."""

    chat: ChatTemplate
    """The chat template of the base model of the role's policy."""
    longest: int
    """The most tokens of a row."""


Readers = Callable[[str], Reader]
"""A function that returns the reader of a role."""


class Rows(Mapping[str, Mapping[str, bytes]]):
    """Packed rows by episode and role, in a temporary file. Episodes without rows are left out."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[str, dict[str, tuple[int, int]]] = {}  # by episode and role: position and size in the file
        self.images: dict[bytes, bytes] = {}
        """Each image once, by its digest. Rows have the digests."""

    def add(self, episode: str, rows: Mapping[str, Sequence[TrainRow]]) -> None:
        """Add rows of an episode, by role. An episode may be added to several times."""
        # Rows that the episode has already are read, and written again at the end of the file with the new ones.
        earlier_rows: Mapping[str, bytes] = {}
        if episode in self._places:
            earlier_rows = self[episode]
        for role, role_rows in rows.items():
            all_rows = _decode(earlier_rows[role]) if role in earlier_rows else []
            for row in role_rows:
                digests = tuple(self._store_image(image) for image in row.images)
                all_rows.append(msgspec.structs.replace(row, images=digests))
            packed = _encode(all_rows)
            end_of_file = self._file.seek(0, 2)
            self._places.setdefault(episode, {})[role] = (end_of_file, len(packed))
            self._file.write(packed)

    def _store_image(self, image: bytes) -> bytes:
        digest = hashlib.sha256(image).digest()
        self.images[digest] = image
        return digest

    def __getitem__(self, episode: str) -> Mapping[str, bytes]:
        packed: dict[str, bytes] = {}
        for role, (start, size) in self._places[episode].items():
            self._file.seek(start)
            packed[role] = self._file.read(size)
        return packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def roles(self) -> list[str]:
        """The roles that have rows."""
        return sorted({role for roles in self._places.values() for role in roles})


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What can be learned from the records."""

    rows: Rows
    """The rows by episode and role."""
    tasks: Mapping[str, str]
    """The id of the task of each episode."""
    left_out: Mapping[str, int]
    """The number of answers that were left out, by reason."""
    notes: tuple[str, ...] = ()
    """Notes on the rows for the user."""

    @property
    def roles(self) -> list[str]:
        """The roles that have rows."""
        return self.rows.roles

    @property
    def digest(self) -> str:
        """A digest of the rows, in hex."""
        digest = hashlib.blake2b(digest_size=16)
        for episode, roles in self.rows.items():
            for role, rows in roles.items():
                digest.update(f"{episode} {role} {len(rows)} ".encode() + rows)
        return digest.hexdigest()

    def of(self, episodes: Iterable[str], players: Mapping[str, str]) -> dict[str, list[TrainRow]]:
        """Return the rows of these episodes by policy. `players` are the trained roles, each with its policy."""
        rows: dict[str, list[TrainRow]] = {}
        for episode in episodes:
            for role, packed in self.rows[episode].items():
                if role in players:
                    rows_of_policy = rows.setdefault(players[role], [])
                    rows_of_policy += [self._with_images(row) for row in _decode(packed)]
        return rows

    def longest(self, players: Mapping[str, str]) -> dict[str, TrainRow]:
        """Return the longest row of each policy."""
        longest: dict[str, TrainRow] = {}
        for episode in self.rows:
            for name, rows in self.of([episode], players).items():
                for row in rows:
                    if name not in longest or _row_length(row) > _row_length(longest[name]):
                        longest[name] = row
        return longest

    def _with_images(self, row: TrainRow) -> TrainRow:
        """Return the row with its images in place of their digests."""
        if not row.images:
            return row
        return msgspec.structs.replace(row, images=tuple(self.rows.images[digest] for digest in row.images))


def _row_length(row: TrainRow) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


class EpisodeSplit(NamedTuple):
    """The recorded episodes of a run, by their ids."""

    learned: list[str]
    """The episodes to learn from."""
    held_out: list[str]
    """The episodes of held-out tasks."""
    note: str
    """The reason if there is no held-out episode."""


def split_episodes(recorded: Recorded, seed: int, all_tasks: Collection[str] = ()) -> EpisodeSplit:
    """Divide the recorded episodes into episodes to learn from, and episodes of held-out tasks.

    Held-out tasks are drawn from `all_tasks`, by default the tasks of these rows. Different rows of the same records
    hold out the same tasks if they are split with the same `all_tasks`.
    """
    episodes = list(recorded.rows)
    row_tasks = {recorded.tasks[episode] for episode in episodes}
    if len(row_tasks) < FEWEST:
        note = f"no held-out loss: {len(row_tasks)} tasks are too few to hold one out (from {FEWEST} on)"
        return EpisodeSplit(episodes, [], note)
    tasks = sorted(all_tasks or row_tasks)
    random.Random(f"held out {seed}").shuffle(tasks)
    held_out_tasks = set(tasks[: max(1, round(HELD_OUT * len(tasks)))])
    held_out = [episode for episode in episodes if recorded.tasks[episode] in held_out_tasks]
    learned = [episode for episode in episodes if recorded.tasks[episode] not in held_out_tasks]
    note = "" if held_out else "no held-out loss: nothing to learn from is of a held-out task"
    return EpisodeSplit(learned, held_out, note)


def count_rows(rows: Mapping[str, Mapping[str, bytes]], episodes: Collection[str]) -> Counter[str]:
    """Count the rows of each role in these episodes."""
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update({role: len(_decode(packed)) for role, packed in rows[episode].items()})
    return counts
