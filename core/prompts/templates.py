"""A text with slots: the constant text of a role's prompts, and the places at which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Final

import msgspec


class Reading(Enum):
    """The result for a text that matches a template in several ways, instead of values."""

    AMBIGUOUS = "ambiguous"


AMBIGUOUS: Final = Reading.AMBIGUOUS


class Template(msgspec.Struct, frozen=True):
    """Constant texts and the numbers of the slots between them, from 1.

    In a template for matching, no two slots are adjacent, and each number occurs once, in order. In a template for
    filling, slots may be in any order.
    """

    pieces: tuple[str | int, ...]

    @classmethod
    def of(cls, pieces: Iterable[str | int]) -> Template:
        """A template without empty texts. Adjacent texts are joined."""
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
        """The number of constant characters."""
        return sum(map(len, self.texts))

    def fill(self, values: Sequence[str]) -> str:
        """The text with these values in the slots 1, 2, ..."""
        return "".join(piece if isinstance(piece, str) else values[piece - 1] for piece in self.pieces)

    def match(self, text: str) -> tuple[str, ...] | Reading | None:
        """The values with which `fill` gives this text: one for each slot, in the order of the slots.

        None if the text does not match the template, `AMBIGUOUS` if several values of a slot are possible.

        Each constant text has a first and a last possible place. Every match lies between them, so if all first and
        last places are equal, there is only one match.
        """
        earliest = self._earliest_spans(text)
        if earliest is None:
            return None
        if self._latest_spans(text) != earliest:
            return AMBIGUOUS
        # The value of a slot is the text between one constant text and the next.
        return tuple(text[end:start] for (_, end), (start, _) in pairwise(earliest))

    def reach(self, text: str) -> int:
        """The number of characters at the beginning of `text` that match, to show where a text departs from the
        template.
        """
        position = 0  # up to here the text matches
        after_slot = False
        for piece in self.pieces:
            if isinstance(piece, int):
                after_slot = True
                continue
            if after_slot:
                start = text.find(piece, position)
                if start < 0:
                    return position
                position = start + len(piece)
            elif text.startswith(piece, position):
                position += len(piece)
            else:
                for offset, (expected, actual) in enumerate(zip(piece, text[position:], strict=False)):
                    if expected != actual:
                        return position + offset
                return position
            after_slot = False
        return position

    def _earliest_spans(self, text: str) -> list[tuple[int, int]] | None:
        """The earliest start and end of each constant text in `text`, in order; None if the text does not match."""
        spans: list[tuple[int, int]] = []
        position = 0
        after_slot = False
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, int):
                after_slot = True
                continue
            is_last = number == len(self.pieces) - 1
            if after_slot and is_last:  # it must be at the end of the text
                start = len(text) - len(piece)
                is_found = text.endswith(piece) and start >= position
            elif after_slot:
                start = text.find(piece, position)
                is_found = start >= 0
            else:
                start = position
                is_found = text.startswith(piece, position)
            if not is_found:
                return None
            position = start + len(piece)
            after_slot = False
            spans.append((start, position))
        if not after_slot and position < len(text):  # the template ends before the text
            return None
        return self._with_edges(spans, text)

    def _latest_spans(self, text: str) -> list[tuple[int, int]]:
        """The latest start and end of each constant text in `text`, in order. The text must match
        (`_earliest_spans`)."""
        spans: list[tuple[int, int]] = []
        position = len(text)
        before_slot = False
        for number, piece in reversed(list(enumerate(self.pieces))):
            if isinstance(piece, int):
                before_slot = True
                continue
            if number == 0:
                start = 0
            elif before_slot:
                start = text.rfind(piece, 0, position)
            else:
                start = position - len(piece)
            spans.append((start, start + len(piece)))
            position = start
            before_slot = False
        return self._with_edges(spans[::-1], text)

    def _with_edges(self, spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
        """Add an empty span at each end of the text at which the template has a slot, so that every slot lies between
        two spans.
        """
        if self.pieces and isinstance(self.pieces[0], int):
            spans = [(0, 0), *spans]
        if self.pieces and isinstance(self.pieces[-1], int):
            spans = [*spans, (len(text), len(text))]
        return spans


def fault_of(old: Template, new: Template | None = None) -> str:
    """The fault of a template for matching, or of the template `new` that replaces it; "" without a fault."""
    if any(isinstance(a, type(b)) for a, b in pairwise(old.pieces)):
        return "two of its texts, or two of its slots, are adjacent"
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
        repeated = [slot for slot in new.slots if new.slots.count(slot) > 1]
        return f"slot {repeated[0]} occurs twice"
    return ""
