"""Material that a prompt hands over under a label, such as a document that was retrieved.

The application's own code may have looked it up, so that no recorded result explains it. While only one document was
seen, nothing tells its text from the prompt around it.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from cotune.prompts.volatile import Span

SAME = 40
"""Least characters that all texts must have in common after a label: fewer may be a heading of each document."""
_WORDS = (
    "context|documents?|sources?|passages?|excerpts?|articles?|snippets?|references?|knowledge(?: base)?|"
    "(?:search|retrieval) results?|retrieved (?:text|information|content)"
)
_KINDS = "retrieved|relevant|supporting|background|the|following|given|provided|source|reference"
_LABEL = re.compile(
    rf"<(?P<tag>{_WORDS.replace(' ', '_')})\b[^<>\n]*>"  # <context>
    rf"|^[^\w\n]{{0,4}}(?:(?:{_KINDS}) ){{0,2}}(?:{_WORDS})\W{{0,2}}:(?=\s)"  # Context: Parcels take five days.
    rf"|^[^\n:]*\b(?:{_WORDS})\b[^\n:]{{0,30}}:[ \t]*\n",  # Answer from these documents alone:
    re.MULTILINE | re.IGNORECASE,
)
_NEXT = re.compile(
    r"^[^\w\n]{0,4}(?:the |user |customer )?"
    r"(?:question|query|task|request|instructions?|answer|input|message|user|customer)\b[^\n:]{0,20}:",
    re.MULTILINE | re.IGNORECASE,
)
"""What stands below the material, as a rule."""


class _Block(NamedTuple):
    label: str
    start: int
    end: int


def single_material(texts: Iterable[str]) -> Mapping[str, list[Span]]:
    """The spans of each text where it has the same material as all others with this label: it may be no prompt."""
    places: dict[tuple[str, int], list[tuple[str, _Block]]] = {}
    for text in texts:
        count: dict[str, int] = {}
        for block in _blocks(text):
            number = count[block.label] = count.get(block.label, 0) + 1
            places.setdefault((block.label, number), []).append((text, block))
    spans: dict[str, list[Span]] = {}
    for alike in places.values():
        materials = [text[block.start : block.end] for text, block in alike]
        common = len(os.path.commonprefix(materials))  # noqa: RUF071, of characters
        if common < SAME:
            continue  # several documents were seen: they become a slot as they are compared
        for text, block in alike:
            spans.setdefault(text, []).append((block.start, block.start + common))
    return spans


def _blocks(text: str) -> Iterator[_Block]:
    """The material under each label: to the closing tag, or to the next label or the end."""
    labels = list(_LABEL.finditer(text))
    starts = sorted([*(label.start() for label in labels), *(found.start() for found in _NEXT.finditer(text))])
    past = 0
    for label in labels:
        if label.start() < past:
            continue  # inside of the material before it
        start, tag = label.end(), label["tag"]
        if tag:
            closing = text.find(f"</{tag}>", start)
            end = closing if closing >= 0 else len(text)
        else:
            following = bisect_left(starts, start)
            end = starts[following] if following < len(starts) else len(text)
        past = end
        material = text[start:end]
        start += len(material) - len(material.lstrip())
        yield _Block(label[0].lower(), start, start + len(material.strip()))
