"""The prompts of an application's roles as text for people: parts with their slots, and edits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cotune.prompts.chat_texts import KIND_NAMES, Kind
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.parts import FoundPart, FoundParts, FoundRole
from cotune.prompts.templates import Template
from cotune.prompts.wording import Wording
from cotune.tables import BAD, GOOD, NAME, QUIET, plural, snippet

_LINES = 24
"""Maximum number of lines of a part that are shown."""
_VALUE = 58
"""Maximum length of an example that is shown, in characters."""
_WORDS = re.compile(r"\s|\S+")


def shown_parts(found: FoundParts, kinds: Sequence[Kind], *, full: bool = False) -> Group:
    """The text to print about the prompts of an application: each role with its parts of these kinds and examples of
    the values of their slots, and the number of calls left out."""
    wording = Wording(found_part.part for found_part in found.parts)
    calls = sum(role.calls for role in found.roles)
    summary = [found.workflow, plural(calls, "call"), plural(len(found.roles), "role"), ", ".join(found.models)]
    lines: list[RenderableType] = [Text(" · ".join(filter(None, summary)), style="bold")]
    for role in found.roles:
        lines += ["", *_role_lines(role, found, kinds, wording, full)]
    if found.left_out:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(found.left_out.items()))
        is_loss = bool(set(found.left_out) - {_ENOUGH})
        lines += ["", Text(f"calls left out: {counts}", style=BAD if is_loss else QUIET)]
    return Group(*lines)


_ENOUGH = "more than are needed"
"""A reason to leave out calls that is no loss."""


def _role_lines(
    role: FoundRole, found: FoundParts, kinds: Sequence[Kind], wording: Wording, full: bool
) -> Iterable[RenderableType]:
    """The lines of a role: its calls and tasks, its parts of these kinds, and hints at parts that are not shown.

    A part that several roles share is shown below the first of them, and only mentioned at the others.
    """
    yield Text(role.name, style=f"bold {NAME}").append(
        f"  {plural(role.calls, 'call')} of {plural(role.tasks, 'task')}", style=f"not bold {QUIET}"
    )
    parts = found.of(role.name)
    if role.bare:
        yield _note("sends only the task and the answers of others: no prompt to improve")
    for found_part in parts:
        if found_part.part.kind not in kinds:
            continue
        if found_part.part.roles[0] != role.name:
            yield _note(f"has {found_part.part.name}, too")
        else:
            yield from _part_lines(found_part, role, wording, full)
    if role.inputs:
        yield _note(f"{plural(role.inputs, 'user message')} of only one task: input, not a prompt")
    hidden = Counter(found_part.part.kind for found_part in parts if found_part.part.kind not in kinds)
    if hidden:
        counts = " and ".join(plural(count, *KIND_NAMES[kind]) for kind, count in hidden.items())
        yield _note(f"{counts}: --part {','.join(hidden)} shows them")


def _part_lines(found_part: FoundPart, role: FoundRole, wording: Wording, full: bool) -> Iterable[RenderableType]:
    """The lines of a part: its name and length, whether it can be edited, its text, and examples of its
    slots' values.
    """
    part = found_part.part
    line = Text("  ").append(part.name, style="bold")
    about = [plural(part.now.constant, "character")]
    if part.old.slots:
        about.append(plural(len(part.old.slots), "slot"))
    if (part.support.calls, part.support.tasks) != (role.calls, role.tasks):
        about.append(f"in {plural(part.support.calls, 'call')} of {plural(part.support.tasks, 'task')}")
    yield line.append(f"  {', '.join(about)}", style=QUIET)
    if len(part.roles) > 1:
        yield _note(f"the same in {', '.join(part.roles[1:])}")
    if found_part.why:
        yield _note(f"cannot be edited: {found_part.why}", BAD)
    if part.edited:
        yield _note("edited: cotune prompts diff shows the changes", f"not bold {NAME}")
    yield Padding(_template_lines(part.now, wording, full), (0, 0, 0, 4))
    for slot, values in zip(part.old.slots, found_part.examples, strict=True):
        for number, value in enumerate(values):
            # Only the first example of a slot has its mark; the others are aligned below.
            mark = wording.mark(slot) if number == 0 else " " * len(wording.mark(slot))
            example = Text("      ").append(mark, style=NAME).append(" ")
            yield example.append(snippet(value, _VALUE) if value.strip() else "(empty)", style=QUIET)


def _template_lines(template: Template, wording: Wording, full: bool) -> Text:
    """The text of a template with marks for its slots. Without `full`, a long text is cut after a few lines."""
    text = Text()
    for piece in template.pieces:
        if isinstance(piece, str):
            text.append(piece)
        else:
            text.append(wording.mark(piece), style=NAME)
    text.rstrip()
    lines = text.split("\n")
    if full or len(lines) <= _LINES:
        return text
    cut = Text("\n").join(lines[:_LINES])
    return cut.append(f"\n… {plural(len(lines) - _LINES, 'more line')}: --full shows them", style=QUIET)


def _note(text: str, style: str = QUIET) -> Padding:
    """An indented remark on a role; in another style than QUIET it is on a part, and is indented further."""
    indent = 2 if style == QUIET else 4
    return Padding(Text(text, style=style), (0, 0, 0, indent))


def parts_of_prompts(prompts: Prompts, only: Sequence[str] = ()) -> FoundParts:
    """The parts of a file of prompts in the form for `shown_parts`, without values of slots. `only` are the roles to
    show, empty for all."""
    names: dict[str, None] = {}
    for part in prompts.parts:
        names.update(dict.fromkeys(role for role in part.roles if not only or role in only))
    roles: list[FoundRole] = []
    for name in names:
        supports = [part.support for part in prompts.parts if name in part.roles]
        calls = max(support.calls for support in supports)
        tasks = max(support.tasks for support in supports)
        roles.append(FoundRole(name=name, calls=calls, tasks=tasks))
    return FoundParts(
        parts=tuple(FoundPart(part=part, examples=((),) * len(part.old.slots)) for part in prompts.parts),
        roles=tuple(roles),
        workflow=prompts.workflow,
        models=prompts.models,
    )


def parts_as_json(found: FoundParts) -> dict[str, Any]:
    """The parts and roles as one JSON value: texts as lists of constant texts and slot numbers."""
    parts: list[dict[str, Any]] = []
    for found_part in found.parts:
        part = found_part.part
        parts.append(
            {
                "name": part.name,
                "roles": part.roles,
                "kind": part.kind,
                "key": part.key,
                "old": part.old.pieces,
                "calls": part.support.calls,
                "tasks": part.support.tasks,
                "examples": found_part.examples,
                "editable": not found_part.why,
                "why_not": found_part.why,
            }
        )
    roles: list[dict[str, Any]] = []
    for role in found.roles:
        roles.append(
            {"name": role.name, "calls": role.calls, "tasks": role.tasks, "inputs": role.inputs, "bare": role.bare}
        )
    return {
        "workflow": found.workflow,
        "models": found.models,
        "left_out": found.left_out,
        "roles": roles,
        "parts": parts,
    }


def shown_diff(pairs: Sequence[tuple[PromptPart, Template, Template]]) -> Group:
    """Show the changes of prompt parts as a diff: old lines, then new ones, with changed words in bold."""
    wording = Wording(PromptPart(name="", roles=(), kind="user", old=old, new=new) for _, old, new in pairs)
    lines: list[RenderableType] = []
    for part, old, new in pairs:
        size = f"{old.constant:,} -> {new.constant:,} characters"
        support = f"{plural(part.support.calls, 'call')} of {plural(part.support.tasks, 'task')}"
        lines += [Text(part.name, style="bold").append(f"  {size}, {support}", style=f"not bold {QUIET}")]
        if len(part.roles) > 1:
            lines.append(Text(f"  roles: {', '.join(part.roles)}", style=QUIET))
        table = Table.grid(padding=(0, 1, 0, 0))
        for sign, line in _diff_lines(wording.text(old), wording.text(new)):
            table.add_row(Text(f"  {sign}", style=line.style), line)
        lines += [table, ""]
    return Group(*lines[:-1])


def _diff_lines(old: str, new: str) -> Iterable[tuple[str, Text]]:
    """The lines of a diff between two texts, each with its sign. Of a long run of equal lines, only the first two and
    the last are shown.
    """
    old_lines = old.splitlines()
    new_lines = new.splitlines()
    matcher = SequenceMatcher(None, old_lines, new_lines, autojunk=False)
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            equal = old_lines[old_start:old_end]
            if len(equal) > 4:
                equal = [*equal[:2], f"… {plural(len(equal) - 3, 'equal line')}", equal[-1]]
            for line in equal:
                yield " ", Text(line, style=QUIET)
            continue
        removed = "\n".join(old_lines[old_start:old_end])
        added = "\n".join(new_lines[new_start:new_end])
        if old_end > old_start:
            for text in _bold_differences(removed, added, BAD):
                yield "-", text
        if new_end > new_start:
            for text in _bold_differences(added, removed, GOOD):
                yield "+", text


def _bold_differences(text: str, other: str, style: str) -> Iterable[Text]:
    """The lines of a text, with the words that `other` does not have in bold."""
    words = _WORDS.findall(text)
    matcher = SequenceMatcher(None, words, _WORDS.findall(other), autojunk=False)
    marked = Text(style=style)
    for tag, start, end, _, _ in matcher.get_opcodes():
        marked.append("".join(words[start:end]), style="" if tag == "equal" else "bold")
    return marked.split("\n", allow_blank=True)
