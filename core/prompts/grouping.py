"""Which texts of one place are one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from cotune.prompts.alignment import (
    LONG,
    Block,
    Row,
    are_one,
    blocks_of,
    common,
    merged,
    row_of,
    size,
    sound,
    template_of,
)
from cotune.prompts.recorded import SeenText
from cotune.prompts.templates import Template

_FIRST = 16
"""Texts that are compared each with each; further ones join the prompts of these, or begin new ones."""
_AT_ONCE = 128
"""Further texts that are compared with the prompts in a round; the others wait for what the round shows."""
_ROUNDS = 8
"""Rounds at most: texts that no prompt reads by then stay apart."""


@dataclass
class Group:
    """Texts that are one prompt, and the words that they have in common."""

    row: Row
    texts: list[SeenText]

    @property
    def firm(self) -> bool:
        """Whether it stands for several texts, or several tasks."""
        return len(self.texts) > 1 or len(self.tasks) > 1

    @property
    def tasks(self) -> set[str]:
        """The tasks in which it was sent."""
        return {task for text in self.texts for task in text.tasks}

    @property
    def calls(self) -> set[str]:
        """The calls that sent it."""
        return {call for text in self.texts for call in text.calls}

    @cached_property
    def size(self) -> int:
        """Its constant characters."""
        return size(self.row)

    @cached_property
    def pairs(self) -> set[tuple[Hashable, Hashable]]:
        """Words that are neighbours."""
        return set(pairwise(self.row))

    @cached_property
    def _rough(self) -> Template:
        return template_of(self.row)

    def reads(self, text: SeenText) -> int:
        """The constant characters of the prompt where it reads a text as it is, whose gaps stand in slots; else -1."""
        template = self._rough
        values = template.match(text.text)
        if not isinstance(values, tuple):
            return -1
        at = 0
        for piece in template.pieces:
            end = at + len(piece if isinstance(piece, str) else values[piece - 1])
            if isinstance(piece, str) and any(start < end and at < stop for start, stop in text.gaps):
                return -1
            at = end
        return template.constant

    def template(self) -> Template:
        """Its constant text and slots, which read each of its texts in one way."""
        return sound(self._rough, [text.text for text in self.texts])


class _Fit(NamedTuple):
    shared: int
    blocks: list[Block]


def grouped(texts: Iterable[SeenText]) -> list[Group]:
    """The prompts of a place: texts that are nothing but what the records explain belong to none."""
    alone = [Group(row, [text]) for text in texts if size(row := row_of(text.text, text.gaps))]
    step = max(1, len(alone) // _FIRST)
    first = alone[::step][:_FIRST]
    groups = _merged(first)
    waiting = [one for one in alone if not any(one is other for other in first)]
    apart: list[Group] = []
    for _ in range(_ROUNDS):
        if not waiting:
            break
        # A part of them, from all over the records, joins prompts or begins new ones.
        step = -(-len(waiting) // _AT_ONCE)
        known = {id(group) for group in groups if group.firm}
        for one in waiting[::step]:
            _join(groups, one)
        waiting = [one for number, one in enumerate(waiting) if number % step]
        if not waiting:
            break
        # The rest need no alignment if a prompt reads them as they are. Single texts are compared no more: so many
        # texts that are all unlike are input, and comparing each with each would take hours.
        firm = [group for group in groups if group.firm]
        apart += [group for group in groups if not group.firm]
        groups, waiting = firm, [one for one in waiting if not _read_by(firm, one)]
        if known.issuperset(id(group) for group in firm):
            break
    groups = [*groups, *apart, *waiting]
    # Late texts may have taken from a prompt what kept it apart from another.
    return _merged(groups) if len(alone) > len(first) and len(groups) <= 2 * _FIRST else groups


def _merged(groups: Sequence[Group]) -> list[Group]:
    """The groups, those that share most as one."""
    left = dict(enumerate(groups))
    fits = {(i, j): fit for i in left for j in left if i < j and (fit := _fit(left[i], left[j]))}
    number = len(left)
    while fits:
        i, j = max(fits, key=lambda pair: (fits[pair].shared, -pair[0], -pair[1]))
        new = _one(left[i], left[j], fits[i, j])
        fits = {pair: fit for pair, fit in fits.items() if not {i, j} & set(pair)}
        del left[i], left[j]
        for other, group in left.items():
            if fit := _fit(group, new):
                fits[other, number] = fit
        left[number] = new
        number += 1
    return list(left.values())


def _join(groups: list[Group], one: Group) -> None:
    """Put a text into the prompt that reads it, or else into the one that shares most, or else by itself."""
    if _read_by(groups, one):
        return
    fits = {number: fit for number, group in enumerate(groups) if (fit := _fit(group, one))}
    if not fits:
        groups.append(one)
        return
    best = max(fits, key=lambda number: fits[number].shared)
    groups[best] = _one(groups[best], one, fits[best])


def _read_by(groups: Sequence[Group], one: Group) -> bool:
    """Put a text into the prompt that reads it with the most constant text; False if none does."""
    (text,) = one.texts
    constant, number = max(((group.reads(text), number) for number, group in enumerate(groups)), default=(0, 0))
    if constant <= 0:
        return False
    groups[number].texts.append(text)
    return True


def _fit(a: Group, b: Group) -> _Fit | None:
    """What two groups share, where that makes them one prompt."""
    if not _may_fit(a, b):
        return None
    blocks = blocks_of(a.row, b.row)
    return _Fit(common(a.row, blocks), blocks) if are_one(a.row, b.row, blocks, a.firm, b.firm) else None


def _may_fit(a: Group, b: Group) -> bool:
    """Whether they can be one, by a bound that costs little: a run has words that are neighbours in both, or is one
    word at an end."""
    if a.row[0] == b.row[0] or a.row[-1] == b.row[-1]:
        return True
    shared = a.pairs & b.pairs
    if not shared:
        return False
    bound = size([word for pair in pairwise(a.row) if pair in shared for word in pair])
    return 2 * bound >= min(a.size, b.size) or bound >= LONG


def _one(a: Group, b: Group, fit: _Fit) -> Group:
    return Group(merged(a.row, b.row, fit.blocks), [*a.texts, *b.texts])
