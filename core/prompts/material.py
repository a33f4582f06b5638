"""Material in a prompt under a label, for example a retrieved document.

The application's own code may have retrieved it, so that it is in no recorded result. If all records have the same
document, its text looks like part of the prompt.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from cotune.prompts.volatile import Span

SAME = 40
"""Minimum characters that all texts must have in common after a label. Fewer may be a heading of each document."""
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
"""The usual text below the material."""


class _Block(NamedTuple):
    label: str
    start: int
    end: int


def single_material(texts: Iterable[str]) -> Mapping[str, list[Span]]:
    """The spans of documents that are the same in all texts, by text. A document has a label before it, such as
    "Context:".

    Such a document looks like constant text of the prompt. But it may be that the application retrieved the same
    document in all records, so it must not become text that can be edited.
    """
    # Compare the first "Context:" of all texts, the second "Context:" of all texts, the first "Document:", ...
    blocks_of_label: dict[tuple[str, int], list[tuple[str, _Block]]] = {}
    for text in texts:
        label_counts: Counter[str] = Counter()
        for block in _labelled_blocks(text):
            label_counts[block.label] += 1
            blocks_of_label.setdefault((block.label, label_counts[block.label]), []).append((text, block))

    spans: dict[str, list[Span]] = {}
    for same_label in blocks_of_label.values():
        documents = [text[block.start : block.end] for text, block in same_label]
        common = len(os.path.commonprefix(documents))  # noqa: RUF071, of characters
        if common < SAME:
            continue  # the documents differ, so that a comparison of the texts already makes them a slot
        for text, block in same_label:
            spans.setdefault(text, []).append((block.start, block.start + common))
    return spans


def _labelled_blocks(text: str) -> Iterator[_Block]:
    """The material under each label: up to the closing tag, or up to the next label or the end."""
    labels = list(_LABEL.finditer(text))
    starts = sorted(match.start() for match in [*labels, *_NEXT.finditer(text)])
    last_end = 0
    for label in labels:
        if label.start() < last_end:
            continue  # inside the material before it
        start = label.end()
        tag = label["tag"]
        if tag:
            closing = text.find(f"</{tag}>", start)
            end = closing if closing >= 0 else len(text)
        else:
            following = bisect_left(starts, start)
            end = starts[following] if following < len(starts) else len(text)
        last_end = end
        material = text[start:end]
        start += len(material) - len(material.lstrip())
        yield _Block(label[0].lower(), start, start + len(material.strip()))
