"""Templates as one text each, in which slots stand as marks: for people, and for models, to read and to change."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cotune.errors import RecordError
from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Template, fault_of

_PAIRS = (("⟦", "⟧"), ("⟪", "⟫"), ("⦃", "⦄"), ("⦗", "⦘"), ("⟮", "⟯"))


class Wording:
    """Texts of templates with slots as `⟦1⟧`, in signs that none of them holds, and back."""

    def __init__(self, parts: Iterable[PromptPart]) -> None:
        said = {sign for part in parts for text in (*part.old.texts, *part.now.texts) for sign in text}
        pair = next((pair for pair in _PAIRS if not set(pair) & said), None)
        if pair is None:
            raise RecordError("The prompts hold every sign that could stand for a slot.", "Change them in the source.")
        self.left, self.right = pair
        self._slot = re.compile(f"{self.left}([0-9]+){self.right}")

    def mark(self, slot: int) -> str:
        """What stands for a slot."""
        return f"{self.left}{slot}{self.right}"

    def text(self, template: Template) -> str:
        """The text of a template."""
        return "".join(piece if isinstance(piece, str) else self.mark(piece) for piece in template.pieces)

    def template(self, text: str) -> Template:
        """The template of a text."""
        pieces = self._slot.split(text)
        return Template.of(int(piece) if place % 2 else piece for place, piece in enumerate(pieces))

    def fault(self, old: Template, text: str) -> str:
        """Why a text cannot stand in place of `old`; empty where it can."""
        return fault_of(old, self.template(text))
