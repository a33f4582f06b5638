"""Templates as plain texts with marks for their slots, which people and models can read and change."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cotune.errors import RecordError
from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Template, fault_of

_PAIRS = (("⟦", "⟧"), ("⟪", "⟫"), ("⦃", "⦄"), ("⦗", "⦘"), ("⟮", "⟯"))


class Wording:
    """Converts templates to texts with marks such as `⟦1⟧` for slots, and back. The brackets occur in none of the
    texts."""

    def __init__(self, parts: Iterable[PromptPart]) -> None:
        """Choose brackets for slots that none of the texts contains. Raises RecordError if all are in use."""
        characters: set[str] = set()
        for part in parts:
            for text in (*part.old.texts, *part.now.texts):
                characters.update(text)
        pair = next((pair for pair in _PAIRS if not set(pair) & characters), None)
        if pair is None:
            cause = "The prompts contain all brackets that could mark a slot."
            raise RecordError(cause, "Change them in the source.")
        self.left, self.right = pair
        self._slot = re.compile(f"{self.left}([0-9]+){self.right}")

    def mark(self, slot: int) -> str:
        """The mark of a slot."""
        return f"{self.left}{slot}{self.right}"

    def text(self, template: Template) -> str:
        """The text of a template."""
        return "".join(piece if isinstance(piece, str) else self.mark(piece) for piece in template.pieces)

    def template(self, text: str) -> Template:
        """The template of a text."""
        pieces = self._slot.split(text)
        return Template.of(int(piece) if place % 2 else piece for place, piece in enumerate(pieces))

    def fault(self, old: Template, text: str) -> str:
        """The reason why a text cannot replace `old`; empty if it can."""
        return fault_of(old, self.template(text))
