"""What is learned from records: rows by policy and episode, tokenized once and kept packed in a file, so that they may
be more than memory holds."""

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
"""With fewer tasks than these none is held out."""
HELD_OUT = 0.1
"""Share of the tasks that are held out: the loss of a few tasks is enough to see when it rises."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrainRow]).decode


class Reader(NamedTuple):
    """How the answers of a role become rows: in the template of its policy's base, with at most `longest` tokens."""

    chat: ChatTemplate
    longest: int


Readers = Callable[[str], Reader]
"""The reader of each role."""


class Rows(Mapping[str, Mapping[str, bytes]]):
    """Packed rows by episode and role, in a temporary file; episodes without rows are left out."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[str, dict[str, tuple[int, int]]] = {}
        self.images: dict[bytes, bytes] = {}
        """Each image once, by the digest that rows have in its place."""

    def add(self, episode: str, rows: Mapping[str, Sequence[TrainRow]]) -> None:
        """Add the rows of an episode by role."""
        before = self[episode] if episode in self._places else {}
        for role, found in rows.items():
            new = [msgspec.structs.replace(row, images=tuple(map(self._kept, row.images))) for row in found]
            packed = _encode([*(_decode(before[role]) if role in before else ()), *new])
            self._places.setdefault(episode, {})[role] = (self._file.seek(0, 2), len(packed))
            self._file.write(packed)

    def _kept(self, image: bytes) -> bytes:
        digest = hashlib.sha256(image).digest()
        self.images[digest] = image
        return digest

    def __getitem__(self, episode: str) -> Mapping[str, bytes]:
        found = {}
        for role, (start, size) in self._places[episode].items():
            self._file.seek(start)
            found[role] = self._file.read(size)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def roles(self) -> list[str]:
        """The roles that have rows."""
        return sorted({role for roles in self._places.values() for role in roles})


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the records: rows by episode and role, the task of each episode, and what was left out."""

    rows: Rows
    tasks: Mapping[str, str]
    left_out: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def roles(self) -> list[str]:
        """The roles that have rows."""
        return self.rows.roles

    @property
    def digest(self) -> str:
        """What tells two records apart, as far as they are learned from, in hex."""
        found = hashlib.blake2b(digest_size=16)
        for episode, roles in self.rows.items():
            for role, rows in roles.items():
                found.update(f"{episode} {role} {len(rows)} ".encode() + rows)
        return found.hexdigest()

    def of(self, episodes: Iterable[str], players: Mapping[str, str]) -> dict[str, list[TrainRow]]:
        """The rows of some episodes by policy; `players` are the trained roles with the policies that play them."""
        found: dict[str, list[TrainRow]] = {}
        for episode in episodes:
            for role, packed in self.rows[episode].items():
                if role in players:
                    found.setdefault(players[role], []).extend(map(self._seeing, _decode(packed)))
        return found

    def longest(self, players: Mapping[str, str]) -> dict[str, TrainRow]:
        """The longest row of each policy."""
        found: dict[str, TrainRow] = {}
        for episode in self.rows:
            for name, rows in self.of([episode], players).items():
                found[name] = max(filter(None, (found.get(name), *rows)), key=_length)
        return found

    def _seeing(self, row: TrainRow) -> TrainRow:
        if not row.images:
            return row
        return msgspec.structs.replace(row, images=tuple(self.rows.images[digest] for digest in row.images))


def _length(row: TrainRow) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def split(recorded: Recorded, seed: int) -> tuple[list[str], list[str], str]:
    """Episodes to learn from, episodes of tasks that are held out, and a sentence about the latter ("" for none)."""
    episodes = list(recorded.rows)
    tasks = sorted({recorded.tasks[episode] for episode in episodes})
    if len(tasks) < FEWEST:
        return episodes, [], f"no held-out loss: {len(tasks)} tasks are too few to hold one out (from {FEWEST} on)"
    random.Random(f"held out {seed}").shuffle(tasks)
    out = set(tasks[: max(1, round(HELD_OUT * len(tasks)))])
    held_out = [episode for episode in episodes if recorded.tasks[episode] in out]
    return [episode for episode in episodes if recorded.tasks[episode] not in out], held_out, ""


def total(rows: Mapping[str, Mapping[str, bytes]], episodes: Collection[str]) -> Counter[str]:
    """How many rows of each role some episodes have."""
    found: Counter[str] = Counter()
    for episode in episodes:
        found.update({role: len(_decode(packed)) for role, packed in rows[episode].items()})
    return found
