"""Edited prompts as markdown, for who pastes them into the source of an application."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import unified_diff

from cotune.file_names import readable_file_name
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.wording import Wording


def pages(prompts: Prompts) -> dict[str, str]:
    """A page for each role that has an edited part, by the name of its file."""
    wording = Wording(prompts.parts)
    made: dict[str, str] = {}
    for role in prompts.roles:
        file = readable_file_name(role, [name.removesuffix(".md") for name in made]) + ".md"
        parts = [part for part in prompts.parts if part.edited and role in part.roles]
        made[file] = "\n\n".join([f"# {role}", *(_part(part, role, wording) for part in parts)]) + "\n"
    return made


def _part(part: PromptPart, role: str, wording: Wording) -> str:
    old, new = wording.text(part.old), wording.text(part.now)
    seen = f"Seen in {part.support.calls} calls of {part.support.tasks} tasks."
    if others := [one for one in part.roles if one != role]:
        seen += f" The same in {', '.join(others)}."
    if part.old.slots:
        marks = ", ".join(map(wording.mark, part.old.slots))
        seen += f" {marks}: what the application fills in."
    changes = "\n".join(unified_diff(old.splitlines(), new.splitlines(), "old", "new", lineterm=""))
    return "\n\n".join([f"## {part.name}", seen, *_block("text", new), "What changed:", *_block("diff", changes)])


def _block(language: str, text: str) -> Iterable[str]:
    """A block with a fence that the text does not hold."""
    ticks = max((len(found) for found in re.findall("`{3,}", text)), default=2) + 1
    yield f"{'`' * ticks}{language}\n{text}\n{'`' * ticks}"
