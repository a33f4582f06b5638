"""New texts in place of old ones."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.wording import Wording


def as_wide(text: str, like: str) -> str:
    """`text` with the white space at the ends of `like`: models strip it, and applications may rely on it."""
    start = like[: len(like) - len(like.lstrip())]
    end = like[len(like.rstrip()) :]
    return f"{start}{text.strip()}{end}" if like.strip() else text


def edited(parts: Prompts, wording: Wording, texts: Mapping[str, str]) -> Prompts:
    """The prompts with these texts, by the names of their parts."""

    def one(part: PromptPart) -> PromptPart:
        if part.name not in texts:
            return part
        new = wording.template(texts[part.name])
        return msgspec.structs.replace(part, new=None if new == part.old else new)

    return msgspec.structs.replace(parts, parts=tuple(one(part) for part in parts.parts))
