"""Rules for proposed texts. A text that breaks a rule is refused and counted. It is never repaired: nobody proposed the
repaired text."""

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
_COPIED_WORDS = 5
"""Number of words in a row that count as a copy."""
_ID = re.compile(r"\b(?=[\w-]{0,100}\d{2})[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*\b")
"""Names of things in a text: an order, a flight, a year."""
_LABEL_TASKS = 3
"""Number of tasks from which a shared value counts as a label and not as part of a task."""
_LEAST_CHARACTERS = 3
_LEAST_PLAIN_CHARACTERS = 8
"""Minimum characters of a value that differs from usual text, and of a value that is a plain word."""
_ADDRESSES = (
    # The repetitions are bounded: a match may begin at many places, and unbounded ones would take quadratic time.
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
"""Names of tools, roles and fields in prompts: snake_case, before a bracket, or between backticks."""


class Refusal(msgspec.Struct, frozen=True):
    """The reason why a text is refused: the rule, and the part of the text that breaks it."""

    rule: Rule
    detail: str


class ProtectedTexts:
    """Texts that must not be copied into a prompt, and names that a prompt may use."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Names of tools, roles and fields."""
        self._rows: set[int] = set()
        """Rows of words in tasks, answers and results of tools (`_word_rows`)."""
        self._values: Counter[str] = Counter()
        """Distinctive values of tasks, with the number of tasks that have each."""

    def task(self, task: Task) -> None:
        """Add the texts of a task: its rows of words, and its distinctive values, such as its id and numbers."""
        values = {task.id.strip()}
        for text in strings(task.input):
            self.text(text)
            values.add(text.strip())
            values.update(_ID.findall(text))
        for leaf in leaves(task.input):
            if isinstance(leaf, int | float) and not isinstance(leaf, bool):
                values.add(str(leaf))
        self._values.update(value for value in values if _is_distinctive(value))
        self.names.update(_keys_in(task.input))

    def text(self, text: str) -> None:
        """Add the rows of words of an answer or of a tool's result."""
        self._rows.update(_word_rows(text))

    def copied(self, new: str, old: str) -> str:
        """The first words, or the first value of a task, that `new` copies from the protected texts; "" without a copy.

        Words that the text before (`old`) has, too, are no copy.
        """
        rows_of_old = _word_rows(old)
        words = _WORD.findall(new)
        for start, row in enumerate(_hash_rows(words)):
            if row in self._rows and row not in rows_of_old:
                return " ".join(words[start : start + _COPIED_WORDS])
        for value, count in self._values.items():
            # A value of many tasks is a label that the application itself uses.
            if count < _LABEL_TASKS and _holds_word(new, value) and not _holds_word(old, value):
                return value
        return ""


def max_characters(part: PromptPart) -> int:
    """Maximum constant characters of a new text for a part: 1.5 times those of the old text, plus 500."""
    return int(1.5 * part.old.constant) + 500


def find_refusals(part: PromptPart, new: Template, recorded: ProtectedTexts | None = None) -> list[Refusal]:
    """The reasons why a text must not replace the text of a part; empty if it may.

    `recorded` has the texts of recorded tasks, which must not be copied, and the names that a prompt may use. Without
    it nothing counts as copied or unknown.
    """
    limit = max_characters(part)
    if new.constant > limit:  # checked first: the other rules take time that grows with the text
        return [Refusal("too_long", f"it has {new.constant:,} characters, and {limit:,} are allowed")]

    # 1. The template as a whole: its slots, and whether it changes anything but white space.
    reasons: list[Refusal] = []
    if fault := fault_of(part.old, new):
        reasons.append(Refusal("lost_slot", fault))
    if _text_with_slots(new).split() == _text_with_slots(part.now).split():
        reasons.append(Refusal("same", "it is equal to the present text"))

    # 2. Its constant text. Whatever the application's own text has is allowed in the new text, too.
    old_text = "\n".join(part.old.texts)
    new_text = "\n".join(new.texts)
    for character in UNSEEN.findall(new_text):
        if character not in old_text:
            reasons.append(Refusal("invisible", f"the character U+{ord(character):04X}, which is invisible"))
            break
    if recorded is not None and (copied_text := recorded.copied(new_text, old_text)):
        reasons.append(Refusal("copies_task", copied_text))
    for address in _ADDRESS.findall(new_text):
        without_punctuation = address.rstrip(".,;:")  # of the sentence that the address ends
        if without_punctuation not in old_text:
            reasons.append(Refusal("new_address", address))
            break
    if recorded is not None:
        allowed_names = {*recorded.names, *_NAME.findall(old_text), *_WORD.findall(old_text)}
        for name in _NAME.findall(new_text):
            if name not in allowed_names:
                reasons.append(Refusal("unknown_name", name))
                break
    return reasons


def _text_with_slots(template: Template) -> str:
    """A template as one text, to compare: each slot is its number between characters that no prompt has."""
    return "".join(piece if isinstance(piece, str) else f"\0{piece}\0" for piece in template.pieces)


def _word_rows(text: str) -> set[int]:
    """The rows of `_COPIED_WORDS` words in a text, as hashes."""
    return set(_hash_rows(_WORD.findall(text)))


def _hash_rows(words: list[str]) -> Iterable[int]:
    """A hash of each row of `_COPIED_WORDS` words, by the row's first word. Upper and lower case are the same."""
    folded = [word.casefold() for word in words]
    for start in range(len(folded) - _COPIED_WORDS + 1):
        yield hash(tuple(folded[start : start + _COPIED_WORDS]))


def _is_distinctive(value: str) -> bool:
    """Whether a value differs from the words that any prompt may contain."""
    is_plain_word = value.isalpha() and value == value.lower()
    least = _LEAST_PLAIN_CHARACTERS if is_plain_word else _LEAST_CHARACTERS
    return len(value) >= least


def _holds_word(text: str, value: str) -> bool:
    """Whether a value occurs in a text, and not inside a longer word: "art" is not in "start now"."""
    start = text.find(value)
    while start >= 0:
        end = start + len(value)
        # One character; empty at the start or the end of the text.
        before = text[start - 1 : start]
        after = text[end : end + 1]
        continues_a_word = before.isalnum() and value[0].isalnum()
        is_continued = value[-1].isalnum() and after.isalnum()
        if not continues_a_word and not is_continued:
            return True
        start = text.find(value, start + 1)
    return False


def _keys_in(value: Any) -> Iterable[str]:
    """All keys in a JSON value, at any depth."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _keys_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _keys_in(item)
