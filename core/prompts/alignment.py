"""Align texts of one kind: their common parts, and their differences.

A text is a row of words, each with the white space before it. A part that is known to vary is a gap, which equals no
other gap and no word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from itertools import accumulate
from typing import NamedTuple

from cotune.prompts.templates import Template
from cotune.prompts.volatile import Span

Row = list[Hashable]
"""Words, and a new object for each gap."""

_WIDE = "\u2e80-\u9fff\ua000-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff\u0e00-\u0eff"
"""Characters of scripts without spaces between words. Each counts as a word."""
_WORD = re.compile(rf"\s*(?:[{_WIDE}]|[^\s{_WIDE}]+)|\s+")
_LEAST_RUN_CHARACTERS = 12
_LEAST_RUN_WORDS = 2
"""Minimum characters and words of a common run between two differences."""
_LEAST_BETWEEN_SLOTS = 8
"""Minimum characters between two slots."""
_EDGE = 24
_SHORT_TEXT_EDGE = 12
_SHORT_TEXT = 48
"""Common characters at an end with which two texts count as one prompt: `_EDGE`, or `_SHORT_TEXT_EDGE` for texts with
fewer than `_SHORT_TEXT` characters."""
LONG_RUN = 120
"""Common characters in a row at any place with which two texts count as one prompt."""
_STAYING_SHARE = 0.6
"""The share of a prompt's common characters that must stay when another text joins it."""
_LONG_TEXT_WORDS = 1_500
"""Number of words from which lines are compared first, and frequent words are ignored at first."""


class Block(NamedTuple):
    """A run of words that two rows have in common: its start in each row, and its number of words."""

    a: int
    b: int
    size: int


def row_of(text: str, gaps: Sequence[Span]) -> Row:
    """The words of a text, cut at its gaps. Gaps are in order and do not overlap."""
    row: Row = []
    position = 0
    for start, end in gaps:
        row += _WORD.findall(text, position, start)
        row.append(object())
        position = end
    return row + _WORD.findall(text, position)


def constant_characters(row: Sequence[Hashable]) -> int:
    """The number of constant characters of a row."""
    return sum(len(word) for word in row if isinstance(word, str))


def blocks_of(a: Row, b: Row) -> list[Block]:
    """The common runs of two rows that are long enough not to be chance, or lie at the start or end of both rows."""
    return [block for block in _matching_runs(a, b) if _is_long_enough(a, b, block)]


def _is_long_enough(a: Row, b: Row, block: Block) -> bool:
    """Whether a common run is long enough not to be chance, or lies at the start or end of both rows."""
    starts_both = block.a == block.b == 0
    ends_both = block.a + block.size == len(a) and block.b + block.size == len(b)
    if starts_both or ends_both:
        return True
    words = [str(word) for word in a[block.a : block.a + block.size]]
    characters = 0
    for word in words:
        characters += len(word)
        if ord(word[-1]) >= 0x0E00:  # a character of Thai, Chinese, ..., which is a word of its own, counts twice
            characters += 1
    return len(words) >= _LEAST_RUN_WORDS and characters >= _LEAST_RUN_CHARACTERS


def _matching_runs(a: Row, b: Row) -> list[Block]:
    """The runs of words that two rows (texts as lists of words) share, in the order of both.

    The equal start and end are found first, as they are cheap; only the part between them is aligned.
    """
    start = 0
    shorter = min(len(a), len(b))
    while start < shorter and a[start] == b[start]:
        start += 1
    end = 0
    while end < shorter - start and a[-1 - end] == b[-1 - end]:
        end += 1
    inner_a = a[start : len(a) - end]
    inner_b = b[start : len(b) - end]
    is_long = min(len(inner_a), len(inner_b)) > _LONG_TEXT_WORDS
    inner = _by_lines(inner_a, inner_b) if is_long else _by_words(inner_a, inner_b)
    blocks = [Block(0, 0, start)]
    blocks += [Block(start + block.a, start + block.b, block.size) for block in inner]
    blocks.append(Block(len(a) - end, len(b) - end, end))
    return _connect_blocks(blocks)


def _by_words(a: Row, b: Row) -> list[Block]:
    """The runs of words that two rows share."""
    matcher = SequenceMatcher(None, a, b, autojunk=max(len(a), len(b)) > _LONG_TEXT_WORDS)
    return [Block(*block) for block in matcher.get_matching_blocks()]


def _by_lines(a: Row, b: Row) -> list[Block]:
    """The runs of words that two long rows share: first whole lines, then words between the shared lines.

    Aligning all words of long texts at once would take too long.
    """
    lines_a = _lines(a)
    lines_b = _lines(b)
    # The index of the first word of each line, and of the end.
    word_of_line_a = [0, *accumulate(map(len, lines_a))]
    word_of_line_b = [0, *accumulate(map(len, lines_b))]

    blocks: list[Block] = []
    # The first words after the block before.
    next_a = 0
    next_b = 0
    for shared_lines in _by_words([*lines_a], [*lines_b]):  # here each line counts as one word
        start_a = word_of_line_a[shared_lines.a]
        start_b = word_of_line_b[shared_lines.b]
        # The lines before the shared ones differ, but may have words in common.
        for shared_words in _by_words(a[next_a:start_a], b[next_b:start_b]):
            blocks.append(Block(next_a + shared_words.a, next_b + shared_words.b, shared_words.size))
        next_a = word_of_line_a[shared_lines.a + shared_lines.size]
        next_b = word_of_line_b[shared_lines.b + shared_lines.size]
        blocks.append(Block(start_a, start_b, next_a - start_a))
    return blocks


def _lines(row: Row) -> list[tuple[Hashable, ...]]:
    """The words of each line of a text. A word begins with the white space before it."""
    lines: list[list[Hashable]] = [[]]
    for word in row:
        if isinstance(word, str):
            space_before = word[: len(word) - len(word.lstrip())]
            if "\n" in space_before:
                lines.append([])
        lines[-1].append(word)
    return [tuple(line) for line in lines if line]


def _connect_blocks(blocks: Sequence[Block]) -> list[Block]:
    """The blocks without empty ones. Blocks that follow each other in both rows are joined."""
    joined: list[Block] = []
    for block in blocks:
        if not block.size:
            continue
        last = joined[-1] if joined else None
        if last and last.a + last.size == block.a and last.b + last.size == block.b:
            joined[-1] = Block(last.a, last.b, last.size + block.size)
        else:
            joined.append(block)
    return joined


def common_characters(a: Row, blocks: Sequence[Block]) -> int:
    """The number of characters that two rows have in common."""
    return sum(constant_characters(a[block.a : block.a + block.size]) for block in blocks)


def are_one_prompt(a: Row, b: Row, blocks: Sequence[Block], firm_a: bool, firm_b: bool) -> bool:
    """Whether two rows are texts of one prompt: they share half of the shorter one, a long start or end, or one long
    run. `blocks` are the runs of words that they share.

    A row is `firm` if it already stands for several texts or tasks. Most of its characters must then be shared, so that
    one text that is only similar does not turn most of the prompt into slots.
    """
    shared = common_characters(a, blocks)
    length_a = constant_characters(a)
    length_b = constant_characters(b)
    if not shared:
        return False
    if firm_a and shared < _STAYING_SHARE * length_a:
        return False
    if firm_b and shared < _STAYING_SHARE * length_b:
        return False

    # 1. Half of the shorter text.
    shorter = min(length_a, length_b)
    if shared >= shorter / 2:
        return True

    # 2. One long run.
    run_lengths = [constant_characters(a[block.a : block.a + block.size]) for block in blocks]
    if max(run_lengths) >= LONG_RUN:
        return True

    # 3. A long run at the start of both texts, or at the end of both.
    long_edge = _EDGE if shorter >= _SHORT_TEXT else _SHORT_TEXT_EDGE
    first = blocks[0]
    last = blocks[-1]
    start_together = first.a == 0 and first.b == 0
    end_together = last.a + last.size == len(a) and last.b + last.size == len(b)
    if start_together and run_lengths[0] >= long_edge:
        return True
    return end_together and run_lengths[-1] >= long_edge


def merge_rows(a: Row, b: Row, blocks: Sequence[Block]) -> Row:
    """The common words of two rows (texts as lists of words), with gaps for their differences.

    `blocks` are the runs of words that the rows share. If only one row has words between two runs, the value of the gap
    may be empty.
    """
    row: Row = []
    # The ends of the block before in the two rows.
    end_a = 0
    end_b = 0
    for block in blocks:
        if block.a > end_a or block.b > end_b:
            row.append(object())  # a gap, which equals no word and no other gap
        row += a[block.a : block.a + block.size]
        end_a = block.a + block.size
        end_b = block.b + block.size
    if end_a < len(a) or end_b < len(b):
        row.append(object())
    return row


def template_of(row: Row) -> Template:
    """The row (words, and gaps that are no text) as constant text and slots.

    A short text between two slots becomes part of the slots.
    """
    pieces: list[str | None] = []  # None is a slot
    for word in row:
        if not isinstance(word, str):
            pieces.append(None)
        elif pieces and pieces[-1] is not None:
            pieces[-1] += word
        else:
            pieces.append(word)
    for i in range(1, len(pieces) - 1):
        text = pieces[i]
        if text is not None and len(text) < _LEAST_BETWEEN_SLOTS:
            pieces[i] = None
    return number_slots(pieces)  # it joins adjacent slots


def number_slots(pieces: Sequence[str | None]) -> Template:
    """A template from texts and gaps (None). Adjacent gaps become one slot."""
    with_slots: list[str | int] = []
    slots = 0
    for piece in pieces:
        if isinstance(piece, str):
            with_slots.append(piece)
        elif not with_slots or isinstance(with_slots[-1], str):
            slots += 1
            with_slots.append(slots)
    return Template.of(with_slots)


def make_unambiguous(template: Template, texts: Sequence[str]) -> Template:
    """A template that matches each text in exactly one way. Until it does, its shortest text between two slots becomes
    part of the slots."""
    pieces: list[str | None] = [piece if isinstance(piece, str) else None for piece in template.pieces]
    while True:
        template = number_slots(pieces)
        if all(isinstance(template.match(text), tuple) for text in texts):
            return move_spaces_out(template, texts)
        lengths: dict[int, int] = {}  # of the texts between two slots, by their index
        for i, piece in enumerate(pieces[1:-1], start=1):
            if piece is not None:
                lengths[i] = len(piece)
        if not lengths:
            return number_slots([None])
        shortest = min(lengths, key=lambda i: lengths[i])
        pieces[shortest] = None


def move_spaces_out(template: Template, texts: Sequence[str]) -> Template:
    """Move white space out of the slots of a template: if all values of a slot begin or end with it, it is constant
    text. `texts` are the texts from which the values are read.
    """
    values_of_texts: list[tuple[str, ...]] = []
    for text in texts:
        values = template.match(text)
        if isinstance(values, tuple):  # else the text matches in several ways, or not
            values_of_texts.append(values)
    pieces: list[str | int] = []
    for piece in template.pieces:
        if isinstance(piece, str):
            pieces.append(piece)
            continue
        slot = piece
        slot_values = [values[slot - 1] for values in values_of_texts]  # slots count from 1
        space_before = _common_start_space(slot_values)
        # Without the space before, so that a value of spaces only is not taken apart twice.
        values_after_space = [value.removeprefix(space_before) for value in slot_values]
        reversed_values = [value[::-1] for value in values_after_space]
        space_after = _common_start_space(reversed_values)[::-1]
        pieces += [space_before, slot, space_after]
    return Template.of(pieces)


def _common_start_space(texts: Sequence[str]) -> str:
    """The white space that all texts begin with."""
    spaces = [text[: len(text) - len(text.lstrip())] for text in texts]
    return os.path.commonprefix(spaces)  # noqa: RUF071, of characters
