"""New texts in place of old ones."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.wording import Wording


def as_wide(text: str, like: str) -> str:
    """Return `text` with the white space at the ends of `like`: models strip it, and applications may rely on it."""
    start = like[: len(like) - len(like.lstrip())]
    end = like[len(like.rstrip()) :]
    return f"{start}{text.strip()}{end}" if like.strip() else text


def edited_prompts(parts: Prompts, wording: Wording, texts: Mapping[str, str]) -> Prompts:
    """Return the prompts with these new texts, by the names of their parts."""
    edited_parts: list[PromptPart] = []
    for part in parts.parts:
        if part.name in texts:
            new = wording.template(texts[part.name])
            part = msgspec.structs.replace(part, new=None if new == part.old else new)
        edited_parts.append(part)
    return msgspec.structs.replace(parts, parts=tuple(edited_parts))
