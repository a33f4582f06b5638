"""What is learned from a records file: rows by policy and episode, tokenized once and kept packed."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.chat.template import ChatTemplate

FEWEST = 10
"""With fewer tasks than these none is held out."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TrainRow]).decode


class Reader(NamedTuple):
    """How the answers of a role become rows: in the template of its policy's base, with at most `longest` tokens."""

    chat: ChatTemplate
    longest: int


Readers = Callable[[str], Reader]
"""The reader of each role."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the records: rows by episode and role, the task of each episode, and what was left out."""

    rows: Mapping[str, Mapping[str, bytes]]
    """Packed rows, by episode and role, with the digests of their images."""
    images: Mapping[bytes, bytes]
    """Each image once, by its digest."""
    tasks: Mapping[str, str]
    left_out: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def roles(self) -> list[str]:
        """The roles that have rows."""
        return sorted({role for roles in self.rows.values() for role in roles})

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

    def _seeing(self, row: TrainRow) -> TrainRow:
        if not row.images:
            return row
        return msgspec.structs.replace(row, images=tuple(self.images[digest] for digest in row.images))


def pack(
    rows: Mapping[str, Mapping[str, Sequence[TrainRow]]],
) -> tuple[dict[str, dict[str, bytes]], dict[bytes, bytes]]:
    """Rows by episode and role, packed, and their images by the digests that they have in their place; episodes without
    rows are left out."""
    images: dict[bytes, bytes] = {}

    def kept(image: bytes) -> bytes:
        digest = hashlib.sha256(image).digest()
        images[digest] = image
        return digest

    def packed(found: Sequence[TrainRow]) -> bytes:
        return _encode([msgspec.structs.replace(row, images=tuple(map(kept, row.images))) for row in found])

    return {e: {role: packed(found) for role, found in roles.items()} for e, roles in rows.items() if roles}, images


def split(recorded: Recorded, share: float, seed: int) -> tuple[list[str], list[str], str]:
    """Episodes to learn from, episodes of tasks that are held out, and a sentence about the latter ("" for none)."""
    episodes = list(recorded.rows)
    tasks = sorted({recorded.tasks[episode] for episode in episodes})
    if not share:
        return episodes, [], ""
    if len(tasks) < FEWEST:
        return episodes, [], f"no held-out loss: {len(tasks)} tasks are too few to hold one out (from {FEWEST} on)"
    random.Random(f"held out {seed}").shuffle(tasks)
    out = set(tasks[: max(1, round(share * len(tasks)))])
    held_out = [episode for episode in episodes if recorded.tasks[episode] in out]
    return [episode for episode in episodes if recorded.tasks[episode] not in out], held_out, ""


def total(rows: Mapping[str, Mapping[str, bytes]], episodes: Collection[str]) -> Counter[str]:
    """How many rows of each role some episodes have."""
    found: Counter[str] = Counter()
    for episode in episodes:
        found.update({role: len(_decode(packed)) for role, packed in rows[episode].items()})
    return found
