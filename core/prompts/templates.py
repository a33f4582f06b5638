"""A text with slots: what is the same in each of a role's prompts, and where they differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Final

import msgspec


class Reading(Enum):
    """What comes in place of the values of a text that can be read in several ways."""

    AMBIGUOUS = "ambiguous"


AMBIGUOUS: Final = Reading.AMBIGUOUS


class Template(msgspec.Struct, frozen=True):
    """Constant text and the numbers of the slots between it, from 1.

    In one that is matched no two slots are neighbours, and each number comes once, in order. In one that is filled
    slots may stand in any order.
    """

    pieces: tuple[str | int, ...]

    @classmethod
    def of(cls, pieces: Iterable[str | int]) -> Template:
        """A template without empty texts, and with neighbouring texts as one."""
        joined: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, str) and joined and isinstance(joined[-1], str):
                joined[-1] += piece
            elif piece != "":
                joined.append(piece)
        return cls(tuple(joined))

    @property
    def texts(self) -> tuple[str, ...]:
        """The constant texts, in order."""
        return tuple(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of the slots, in order."""
        return tuple(piece for piece in self.pieces if isinstance(piece, int))

    @property
    def constant(self) -> int:
        """How many characters are constant."""
        return sum(map(len, self.texts))

    def fill(self, values: Sequence[str]) -> str:
        """The text with these values in the slots 1, 2, ..."""
        return "".join(piece if isinstance(piece, str) else values[piece - 1] for piece in self.pieces)

    def match(self, text: str) -> tuple[str, ...] | Reading | None:
        """The values of the slots where `fill` gives the text with these alone: None where it does with none,
        `AMBIGUOUS` where it does with several.

        Each constant text has a first and a last place that it can stand at. Every reading lies between these two, so
        where they are the same there is one.
        """
        first = self._first(text)
        if first is None:
            return None
        last = self._last(text)
        return _values(text, first) if first == last else AMBIGUOUS

    def reach(self, text: str) -> int:
        """Of a text that does not match, up to which character it could."""
        at, slot = 0, False
        for piece in self.pieces:
            if isinstance(piece, int):
                slot = True
                continue
            if slot:
                found = text.find(piece, at)
                if found < 0:
                    return at
                at = found + len(piece)
            elif text.startswith(piece, at):
                at += len(piece)
            else:
                return at + next((i for i, (a, b) in enumerate(zip(piece, text[at:], strict=False)) if a != b), 0)
            slot = False
        return at

    def _first(self, text: str) -> list[tuple[int, int]] | None:
        """Where each constant text stands if all stand as early as they can; None where they cannot."""
        places: list[tuple[int, int]] = []
        at, slot = 0, False
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, int):
                slot = True
                continue
            start = text.find(piece, at) if slot else at if text.startswith(piece, at) else -1
            if slot and number == len(self.pieces) - 1:
                start = len(text) - len(piece) if text.endswith(piece) and len(text) - len(piece) >= at else -1
            if start < 0:
                return None
            at, slot = start + len(piece), False
            places.append((start, at))
        return self._edged(places, text) if slot or at == len(text) else None

    def _last(self, text: str) -> list[tuple[int, int]]:
        """The same, as late as they can, of a text of which `_first` gives places."""
        places: list[tuple[int, int]] = []
        at, slot = len(text), False
        for number, piece in reversed(list(enumerate(self.pieces))):
            if isinstance(piece, int):
                slot = True
                continue
            start = 0 if not number else text.rfind(piece, 0, at) if slot else at - len(piece)
            places.append((start, start + len(piece)))
            at, slot = start, False
        return self._edged(places[::-1], text)

    def _edged(self, places: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
        """With empty places at the ends where a slot stands there."""
        starts = bool(self.pieces) and isinstance(self.pieces[0], int)
        ends = bool(self.pieces) and isinstance(self.pieces[-1], int)
        return [*([(0, 0)] if starts else []), *places, *([(len(text), len(text))] if ends else [])]


def _values(text: str, places: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    return tuple(text[end:start] for (_, end), (start, _) in pairwise(places))


def fault_of(old: Template, new: Template | None = None) -> str:
    """What is wrong with a template that is matched, or with the one that is filled in its place; "" if nothing."""
    if any(isinstance(a, type(b)) for a, b in pairwise(old.pieces)):
        return "two of its texts, or two of its slots, are neighbours"
    if "" in old.pieces:
        return "one of its texts is empty"
    if old.slots != tuple(range(1, len(old.slots) + 1)):
        return "its slots are not numbered 1, 2, ..."
    if new is not None and sorted(new.slots) != sorted(old.slots):
        lost = sorted(set(old.slots) - set(new.slots))
        if lost:
            return f"slot {lost[0]} is lost"
        extra = sorted(set(new.slots) - set(old.slots))
        if extra:
            return f"slot {extra[0]} is unknown"
        return f"slot {next(slot for slot in new.slots if new.slots.count(slot) > 1)} stands twice"
    return ""
