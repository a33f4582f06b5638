"""Edited prompts as markdown, to paste them into the source of an application."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import unified_diff

from cotune.file_names import readable_file_name
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.wording import Wording


def pages(prompts: Prompts) -> dict[str, str]:
    """A page for each role with an edited part, by the name of its file."""
    wording = Wording(prompts.parts)
    texts: dict[str, str] = {}
    for role in prompts.roles:
        file = readable_file_name(role, [name.removesuffix(".md") for name in texts]) + ".md"
        parts = [part for part in prompts.parts if part.edited and role in part.roles]
        texts[file] = "\n\n".join([f"# {role}", *(_part_section(part, role, wording) for part in parts)]) + "\n"
    return texts


def _part_section(part: PromptPart, role: str, wording: Wording) -> str:
    """One part of a prompt as a section of a page: where it was seen, its new text, and the changes as a diff. `role`
    is the role of the page; other roles that have the same part are named.
    """
    old = wording.text(part.old)
    new = wording.text(part.now)
    support = f"Seen in {part.support.calls} calls of {part.support.tasks} tasks."
    if others := [other for other in part.roles if other != role]:
        support += f" The same in {', '.join(others)}."
    if part.old.slots:
        marks = ", ".join(map(wording.mark, part.old.slots))
        support += f" {marks}: text that the application fills in."
    changes = "\n".join(unified_diff(old.splitlines(), new.splitlines(), "old", "new", lineterm=""))
    return "\n\n".join(
        [f"## {part.name}", support, *_code_block("text", new), "Changes:", *_code_block("diff", changes)]
    )


def _code_block(language: str, text: str) -> Iterable[str]:
    """A code block with a fence that does not occur in the text."""
    ticks = max((len(fence) for fence in re.findall("`{3,}", text)), default=2) + 1
    yield f"{'`' * ticks}{language}\n{text}\n{'`' * ticks}"
