"""Texts of one kind aligned: what they have in common, and where they differ.

A text is a row of words, each with the white space before it; what is known to vary is a gap, which equals nothing.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from cotune.prompts.templates import Template
from cotune.prompts.volatile import Span

Row = list[Hashable]
"""Words, and an object of its own for each gap."""

_WIDE = "\u2e80-\u9fff\ua000-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff\u0e00-\u0eff"
"""Signs of scripts that put no blanks between words: each stands for itself."""
_WORD = re.compile(rf"\s*(?:[{_WIDE}]|[^\s{_WIDE}]+)|\s+")
_RUN, _WORDS = 12, 2
"""Least characters and words that count as common between two differences."""
_INNER = 8
"""Least characters between two slots."""
_EDGE, _SHORT_EDGE, _SHORT = 24, 12, 48
"""Common characters at an end that make two texts one prompt; of texts shorter than `_SHORT`, the fewer."""
LONG = 120
"""Common characters in a row that do so anywhere."""
_KEPT = 0.6
"""The share of what texts had in common that stays when more join them."""
_MANY = 1_500
"""Words from which on lines are compared first, and words that come often are left out at first."""


class Block(NamedTuple):
    """A run of words that two rows have in common: where it starts in each, and how many words it has."""

    a: int
    b: int
    size: int


def row_of(text: str, gaps: Sequence[Span]) -> Row:
    """The words of a text, cut at its gaps, which are a union of spans."""
    row: Row = []
    at = 0
    for start, end in gaps:
        row += _WORD.findall(text, at, start)
        row.append(object())
        at = end
    return row + _WORD.findall(text, at)


def size(row: Sequence[Hashable]) -> int:
    """The constant characters of a row."""
    return sum(len(word) for word in row if isinstance(word, str))


def blocks_of(a: Row, b: Row) -> list[Block]:
    """The runs that count: of `_RUN` characters and `_WORDS` words, or such as start or end both rows."""
    return [block for block in _matching(a, b) if _counts(a, b, block)]


def _counts(a: Row, b: Row, block: Block) -> bool:
    run = a[block.a : block.a + block.size]
    starts = block.a == block.b == 0
    ends = block.a + block.size == len(a) and block.b + block.size == len(b)
    return starts or ends or (len(run) >= _WORDS and _width(run) >= _RUN)


def _width(run: Row) -> int:
    """Characters; a sign that stands for a word counts as two."""
    return sum(len(str(word)) + (ord(str(word)[-1]) >= 0x0E00) for word in run)


def _matching(a: Row, b: Row) -> list[Block]:
    """Runs in common, in the order of both rows."""
    start = 0
    least = min(len(a), len(b))
    while start < least and a[start] == b[start]:
        start += 1
    end = 0
    while end < least - start and a[-1 - end] == b[-1 - end]:
        end += 1
    inner_a, inner_b = a[start : len(a) - end], b[start : len(b) - end]
    found = [Block(0, 0, start)]
    for i, j, n in (_by_lines if min(len(inner_a), len(inner_b)) > _MANY else _by_words)(inner_a, inner_b):
        found.append(Block(start + i, start + j, n))
    found.append(Block(len(a) - end, len(b) - end, end))
    return _connected(found)


def _by_words(a: Row, b: Row) -> list[Block]:
    matcher = SequenceMatcher(None, a, b, autojunk=max(len(a), len(b)) > _MANY)
    return [Block(*block) for block in matcher.get_matching_blocks()]


def _by_lines(a: Row, b: Row) -> list[Block]:
    """Whole lines in common first, then words between them: long texts cost no more than their lines."""
    lines_a, lines_b = _lines(a), _lines(b)
    found: list[Block] = []
    i = j = x = y = 0
    for block in _by_words([*lines_a], [*lines_b]):
        to_i = i + sum(map(len, lines_a[x : block.a]))
        to_j = j + sum(map(len, lines_b[y : block.b]))
        found += [Block(i + p, j + q, n) for p, q, n in _by_words(a[i:to_i], b[j:to_j])]
        words = sum(map(len, lines_a[block.a : block.a + block.size]))
        found.append(Block(to_i, to_j, words))
        i, j, x, y = to_i + words, to_j + words, block.a + block.size, block.b + block.size
    return found


def _lines(row: Row) -> list[tuple[Hashable, ...]]:
    lines: list[list[Hashable]] = [[]]
    for word in row:
        if isinstance(word, str) and "\n" in word[: len(word) - len(word.lstrip())]:
            lines.append([])
        lines[-1].append(word)
    return [tuple(line) for line in lines if line]


def _connected(blocks: Sequence[Block]) -> list[Block]:
    """Without empty runs; those that follow each other in both rows are one."""
    found: list[Block] = []
    for block in blocks:
        if not block.size:
            continue
        last = found[-1] if found else None
        if last and last.a + last.size == block.a and last.b + last.size == block.b:
            found[-1] = Block(last.a, last.b, last.size + block.size)
        else:
            found.append(block)
    return found


def common(a: Row, blocks: Sequence[Block]) -> int:
    """The characters that two rows have in common."""
    return sum(size(a[block.a : block.a + block.size]) for block in blocks)


def are_one(a: Row, b: Row, blocks: Sequence[Block], firm_a: bool, firm_b: bool) -> bool:
    """Whether two rows are one prompt. A row that is `firm` stands for several texts or tasks: of what these have in
    common, most must stay."""
    shared, smaller = common(a, blocks), min(size(a), size(b))
    if not shared:
        return False
    if (firm_a and shared < _KEPT * size(a)) or (firm_b and shared < _KEPT * size(b)):
        return False
    first, last = blocks[0], blocks[-1]
    runs = [size(a[block.a : block.a + block.size]) for block in blocks]
    starts = runs[0] if first.a == first.b == 0 else 0
    ends = runs[-1] if last.a + last.size == len(a) and last.b + last.size == len(b) else 0
    edge = _EDGE if smaller >= _SHORT else _SHORT_EDGE
    return 2 * shared >= smaller or max(starts, ends) >= edge or max(runs) >= LONG


def merged(a: Row, b: Row, blocks: Sequence[Block]) -> Row:
    """What two rows have in common. Where only one of them has words between two runs, the gap may be empty."""
    row: Row = []
    at_a = at_b = 0
    for block in blocks:
        if block.a > at_a or block.b > at_b:
            row.append(object())
        row += a[block.a : block.a + block.size]
        at_a, at_b = block.a + block.size, block.b + block.size
    if at_a < len(a) or at_b < len(b):
        row.append(object())
    return row


def template_of(row: Row) -> Template:
    """The row as constant text and slots. Short text between two slots belongs to them."""
    pieces: list[str | None] = []
    for word in row:
        if not isinstance(word, str):
            if not pieces or pieces[-1] is not None:
                pieces.append(None)
        elif pieces and pieces[-1] is not None:
            pieces[-1] += word
        else:
            pieces.append(word)
    inner = range(1, len(pieces) - 1)
    short = {i for i in inner if (text := pieces[i]) is not None and len(text) < _INNER}
    return numbered([None if i in short else piece for i, piece in enumerate(pieces)])


def numbered(pieces: Sequence[str | None]) -> Template:
    """A template of texts and gaps; gaps that are neighbours become one slot."""
    found: list[str | int] = []
    slots = 0
    for piece in pieces:
        if isinstance(piece, str):
            found.append(piece)
        elif not found or isinstance(found[-1], str):
            slots += 1
            found.append(slots)
    return Template.of(found)


def sound(template: Template, texts: Sequence[str]) -> Template:
    """The template with which each of the texts is read, and in one way only: its shortest texts between two slots
    become part of these until it is so."""
    pieces: list[str | None] = [piece if isinstance(piece, str) else None for piece in template.pieces]
    while True:
        template = numbered(pieces)
        if all(isinstance(template.match(text), tuple) for text in texts):
            return spaced(template, texts)
        inner = [i for i in range(1, len(pieces) - 1) if pieces[i] is not None]
        if not inner:
            return numbered([None])
        pieces[min(inner, key=lambda i: len(pieces[i] or ""))] = None


def spaced(template: Template, texts: Sequence[str]) -> Template:
    """The template with the white space that all values of a slot have at an end beside the slot."""
    values = [found for text in texts if isinstance(found := template.match(text), tuple)]
    pieces: list[str | int] = []
    for piece in template.pieces:
        if isinstance(piece, str):
            pieces.append(piece)
            continue
        of_slot = [row[piece - 1] for row in values]
        before = _shared([value[: len(value) - len(value.lstrip())] for value in of_slot])
        rest = [value[len(before) :] for value in of_slot]
        after = _shared([value[len(value.rstrip()) :][::-1] for value in rest])[::-1]
        pieces += [before, piece, after]
    return Template.of(pieces)


def _shared(texts: Sequence[str]) -> str:
    """The common start."""
    low, high = min(texts, default=""), max(texts, default="")
    return low[: next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))]
