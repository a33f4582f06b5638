"""What a proposed text may not do. It is refused and counted, never repaired: a repaired prompt is one that nobody
proposed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from cotune.json_values import leaves
from cotune.prompts.edits import PromptPart
from cotune.prompts.explained import strings
from cotune.prompts.templates import Template, fault_of
from cotune.records.structs import Task
from cotune.terminal import UNSEEN

Rule = Literal["lost_slot", "same", "too_long", "copies_task", "new_address", "unknown_name", "invisible"]

_WORD = re.compile(r"\w+")
_ROW = 5
"""Words in a row that are a copy."""
_ID = re.compile(r"\b(?=[\w-]{0,100}\d{2})[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*\b")
"""What names a thing in a text: an order, a flight, a year."""
_COMMON = 3
"""Tasks from which on a value that they share is a label, and no task's own."""
_LEAST, _LONG = 3, 8
"""Least characters of a value that can be told from other text, and of one that is a single plain word."""
_ADDRESSES = (
    # Bounded where a match may begin at many places, or a long text without any takes quadratic time.
    r"\b[a-z][a-z0-9+.-]{0,30}://[^\s\"'<>)\]]+",
    r"\bwww\.[\w-]{1,63}\.[^\s\"'<>)\]]+",
    r"[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]*\w",
    r"(?<![\w/.])~?(?:/[\w.-]+){2,}/?",
    r"\b[A-Z]:\\[\w\\. -]+",
    r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
    # Keys: long, of letters and digits.
    r"\b(?=[\w-]{0,100}\d)(?=[\w-]{0,100}[A-Za-z])[A-Za-z0-9][\w-]{19,}\b",
)
_ADDRESS = re.compile("|".join(f"(?:{one})" for one in _ADDRESSES))
_NAME = re.compile(r"\b[A-Za-z]\w*_\w+\b|\b[A-Za-z_]\w*(?=\()|(?<=`)[A-Za-z_][\w.-]*(?=`)")
"""How prompts name tools, roles and fields: snake_case, with a bracket behind, or between backticks."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a text is refused: the rule, and what in the text breaks it."""

    rule: Rule
    detail: str


class Known:
    """What may not be copied into a prompt, and the names that a prompt may use."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Names of tools, roles and fields."""
        self._rows: set[int] = set()
        self._values: Counter[str] = Counter()

    def task(self, task: Task) -> None:
        """Add a task: rows of its words, and each value in it that is its own."""
        for text in strings(task.input):
            self.text(text)
        texts = list(strings(task.input))
        values = {value.strip() for value in (task.id, *texts, *_numbers(task.input))}
        values.update(id for text in texts for id in _ID.findall(text))
        self._values.update(value for value in values if _telling(value))
        self.names.update(_keys(task.input))

    def text(self, text: str) -> None:
        """Add an answer, or what a tool returned: rows of its words."""
        self._rows.update(_rows(text))

    def copied(self, new: str, old: str) -> str:
        """The first words of `new` that are a copy, and do not stand in `old`; "" without any."""
        before = _rows(old)
        words = _WORD.findall(new)
        for start, row in enumerate(_rows_of(words)):
            if row in self._rows and row not in before:
                return " ".join(words[start : start + _ROW])
        for value, count in self._values.items():
            if count < _COMMON and _holds(new, value) and not _holds(old, value):
                return value
        return ""


def longest(part: PromptPart) -> int:
    """Most constant characters of a text in place of a part's: 1.5 times the old one's, and 500 more."""
    return int(1.5 * part.old.constant) + 500


def refusals(part: PromptPart, new: Template, known: Known | None = None) -> list[Refusal]:
    """Why a text may not stand in place of a part's: empty where it may. It is no longer than `longest`."""
    if new.constant > (most := longest(part)):  # alone: the other rules take time that grows with the text
        return [Refusal("too_long", f"it has {new.constant:,} characters, and {most:,} are allowed")]
    found: list[Refusal] = []
    if fault := fault_of(part.old, new):
        found.append(Refusal("lost_slot", fault))
    if " ".join(_shown(new).split()) == " ".join(_shown(part.now).split()):
        found.append(Refusal("same", "it says what the prompt says now"))
    old, said = "\n".join(part.old.texts), "\n".join(new.texts)
    if hidden := next((one for one in UNSEEN.findall(said) if one not in old), ""):
        found.append(Refusal("invisible", f"the character U+{ord(hidden):04X}, which nobody sees"))
    if known is not None and (copy := known.copied(said, old)):
        found.append(Refusal("copies_task", copy))
    if address := next((one for one in _ADDRESS.findall(said) if one.rstrip(".,;:") not in old), ""):
        found.append(Refusal("new_address", address))
    if known is not None:
        words = {*_NAME.findall(old), *_WORD.findall(old)}
        if unknown := next((name for name in _NAME.findall(said) if name not in known.names | words), ""):
            found.append(Refusal("unknown_name", unknown))
    return found


def _shown(template: Template) -> str:
    return "".join(piece if isinstance(piece, str) else f"\0{piece}\0" for piece in template.pieces)


def _rows(text: str) -> set[int]:
    return set(_rows_of(_WORD.findall(text)))


def _rows_of(words: list[str]) -> Iterable[int]:
    folded = [word.casefold() for word in words]
    return (hash(tuple(folded[start : start + _ROW])) for start in range(len(folded) - _ROW + 1))


def _telling(value: str) -> bool:
    """Whether a value can be told from the words that any prompt has."""
    if len(value) < _LEAST:
        return False
    plain = value.isalpha() and value == value.lower()
    return not plain or len(value) >= _LONG


def _holds(text: str, value: str) -> bool:
    """Whether a value stands in a text, and not inside a longer word."""
    at = text.find(value)
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(value) : at + len(value) + 1]
        if not (_joins(before, value[0]) or _joins(value[-1], after)):
            return True
        at = text.find(value, at + 1)
    return False


def _joins(a: str, b: str) -> bool:
    return a.isalnum() and b.isalnum()


def _numbers(value: Any) -> Iterable[str]:
    return (str(one) for one in leaves(value) if isinstance(one, int | float) and not isinstance(one, bool))


def _keys(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield str(name)
            yield from _keys(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _keys(one)
