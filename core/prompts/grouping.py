"""Group the texts that one place of the application sends (such as a role's system messages) into prompts: constant
text with slots for the parts that vary."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

from cotune.prompts.alignment import (
    LONG_RUN,
    Block,
    Row,
    are_one_prompt,
    blocks_of,
    common_characters,
    constant_characters,
    make_unambiguous,
    merge_rows,
    row_of,
    template_of,
)
from cotune.prompts.recorded import SeenText
from cotune.prompts.templates import Template

_SAMPLE_TEXTS = 16
"""Number of texts of which all pairs are compared. Other texts join the prompts of these, or begin new ones."""
_ROUND_TEXTS = 128
"""Number of other texts that are compared with the prompts in a round. The others wait for its result."""
_ROUNDS = 8
"""Maximum number of rounds. Texts that match no prompt after them stay separate."""


@dataclass
class Group:
    """Texts of the same prompt, and their common words."""

    row: Row
    texts: list[SeenText]

    @property
    def is_firm(self) -> bool:
        """Whether the prompt is based on several texts or several tasks."""
        return len(self.texts) > 1 or len(self.tasks) > 1

    @property
    def tasks(self) -> set[str]:
        """The tasks in which the prompt was sent."""
        return set[str]().union(*(text.tasks for text in self.texts))

    @property
    def calls(self) -> set[str]:
        """The calls that sent the prompt."""
        return set[str]().union(*(text.calls for text in self.texts))

    @cached_property
    def size(self) -> int:
        """The number of constant characters."""
        return constant_characters(self.row)

    @cached_property
    def pairs(self) -> set[tuple[Hashable, Hashable]]:
        """Pairs of adjacent words."""
        return set(pairwise(self.row))

    @cached_property
    def _rough_template(self) -> Template:
        return template_of(self.row)

    def constant_if_matching(self, text: SeenText) -> int:
        """The number of constant characters of this prompt if it matches a text, otherwise -1.

        It does not match if a gap of the text, which varies by its nature, lies in constant text of the prompt.
        """
        template = self._rough_template
        values = template.match(text.text)
        if not isinstance(values, tuple):
            return -1
        position = 0
        for piece in template.pieces:
            if isinstance(piece, int):  # a slot, counted from 1
                position += len(values[piece - 1])
                continue
            end = position + len(piece)
            if any(start < end and position < stop for start, stop in text.gaps):
                return -1
            position = end
        return template.constant

    def template(self) -> Template:
        """The constant text and slots of the prompt, which match each of its texts in one way."""
        return make_unambiguous(self._rough_template, [text.text for text in self.texts])


class _Fit(NamedTuple):
    """The common runs of two groups, and the number of their characters."""

    shared: int
    blocks: list[Block]


def group_texts(texts: Iterable[SeenText]) -> list[Group]:
    """Group the texts of one place, such as a role's system messages, into prompts. Texts that consist only of gaps
    belong to no prompt.

    Comparing all pairs would take too long, so a sample is compared first, and the other texts join its prompts in
    rounds.
    """
    singles: list[Group] = []
    for text in texts:
        row = row_of(text.text, text.gaps)
        if constant_characters(row):
            singles.append(Group(row, [text]))

    # 1. Compare all pairs of a few texts, from all over the records.
    step = max(1, len(singles) // _SAMPLE_TEXTS)
    sample = singles[::step][:_SAMPLE_TEXTS]
    groups = _merge_groups(sample)

    # 2. The other texts join the prompts of these texts, or begin new ones.
    others = [single for single in singles if not any(single is sampled for sampled in sample)]
    groups = _join_in_rounds(groups, others)

    # 3. Later texts may have removed the words in which two prompts differed.
    if others and len(groups) <= 2 * _SAMPLE_TEXTS:
        groups = _merge_groups(groups)
    return groups


def _join_in_rounds(groups: list[Group], waiting: list[Group]) -> list[Group]:
    """Let the waiting texts (each a group of its own) join a prompt or begin a new one. Returns all prompts.

    In each round a few of the waiting texts are aligned with the prompts, which is slow. After that, most of the others
    match a prompt and need no alignment.
    """
    single_texts: list[Group] = []
    for _ in range(_ROUNDS):
        if not waiting:
            break
        # 1. Align every n-th waiting text, so that they come from all over the records.
        step = math.ceil(len(waiting) / _ROUND_TEXTS)
        firm_before = {id(group) for group in groups if group.is_firm}
        for text in waiting[::step]:
            _join_text(groups, text)
        waiting = [text for number, text in enumerate(waiting) if number % step != 0]
        if not waiting:
            break
        # 2. Prompts with a single text are not compared any more: many texts that are all different are input, and
        #    comparing all pairs would take hours.
        single_texts += [group for group in groups if not group.is_firm]
        groups = [group for group in groups if group.is_firm]
        # 3. The texts that match a prompt now are done.
        waiting = [text for text in waiting if not _add_to_match(groups, text)]
        has_new_prompt = not firm_before.issuperset(id(group) for group in groups)
        if not has_new_prompt:  # then the next round would align with the same prompts, and find no more
            break
    return [*groups, *single_texts, *waiting]


def _merge_groups(groups: Sequence[Group]) -> list[Group]:
    """Join groups of texts that belong to one prompt, until no two do. The pair that shares most is joined first."""
    remaining = dict(enumerate(groups))
    fits: dict[tuple[int, int], _Fit] = {}
    for i, j in combinations(remaining, 2):
        if fit := _fit_groups(remaining[i], remaining[j]):
            fits[i, j] = fit
    next_number = len(remaining)
    while fits:
        i, j = max(fits, key=lambda pair: (fits[pair].shared, -pair[0], -pair[1]))
        joined = _join_pair(remaining[i], remaining[j], fits[i, j])
        fits = {pair: fit for pair, fit in fits.items() if not {i, j} & set(pair)}
        del remaining[i], remaining[j]
        for other, group in remaining.items():
            if fit := _fit_groups(group, joined):
                fits[other, next_number] = fit
        remaining[next_number] = joined
        next_number += 1
    return list(remaining.values())


def _join_text(groups: list[Group], single: Group) -> None:
    """Add a text to a prompt that it matches, or else to the prompt with which it shares most. Without one, it begins a
    new prompt."""
    if _add_to_match(groups, single):
        return
    fits: dict[int, _Fit] = {}
    for number, group in enumerate(groups):
        fit = _fit_groups(group, single)
        if fit is not None:
            fits[number] = fit
    if not fits:
        groups.append(single)
        return
    best = max(fits, key=lambda number: fits[number].shared)
    groups[best] = _join_pair(groups[best], single, fits[best])


def _add_to_match(groups: Sequence[Group], single: Group) -> bool:
    """Add a text to the prompt that it matches, the one with the most constant text; False if it matches none."""
    (text,) = single.texts
    most_constant = 0
    best: Group | None = None
    for group in groups:
        constant = group.constant_if_matching(text)
        if constant > 0 and constant >= most_constant:
            most_constant = constant
            best = group
    if best is None:
        return False
    best.texts.append(text)
    return True


def _fit_groups(a: Group, b: Group) -> _Fit | None:
    """The words that two groups of texts have in common, if they belong to one prompt; otherwise None."""
    if not _may_fit(a, b):
        return None
    blocks = blocks_of(a.row, b.row)  # the runs of words that both have
    if not are_one_prompt(a.row, b.row, blocks, a.is_firm, b.is_firm):
        return None
    return _Fit(common_characters(a.row, blocks), blocks)


def _may_fit(a: Group, b: Group) -> bool:
    """A quick check before the slow alignment: False if two groups cannot be one prompt.

    Groups of one prompt begin or end with the same word, or have enough pairs of adjacent words in common.
    """
    if a.row[0] == b.row[0] or a.row[-1] == b.row[-1]:
        return True
    shared_pairs = a.pairs & b.pairs
    # A common run inside the texts has two words or more, so an alignment finds at most the words of shared pairs.
    most_common_characters = 0
    for pair in pairwise(a.row):
        if pair in shared_pairs:
            most_common_characters += constant_characters(pair)
    if most_common_characters == 0:
        return False
    # As in `are_one_prompt`: half of the shorter text, or one long run.
    shorter = min(a.size, b.size)
    return most_common_characters >= shorter / 2 or most_common_characters >= LONG_RUN


def _join_pair(a: Group, b: Group, fit: _Fit) -> Group:
    """One prompt for the texts of two groups."""
    return Group(merge_rows(a.row, b.row, fit.blocks), [*a.texts, *b.texts])
