"""The prompts of an application's roles for people: parts with their slots, and what was changed in them."""

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
"""Lines of a part that are shown."""
_VALUE = 58
"""Characters of an example that are shown."""
_WORDS = re.compile(r"\s|\S+")


def shown_parts(found: FoundParts, kinds: Sequence[Kind], *, full: bool = False) -> Group:
    """Roles with their parts of these kinds, the values of slots, and what is too little."""
    wording = Wording(one.part for one in found.parts)
    calls = sum(role.calls for role in found.roles)
    head = [found.workflow, plural(calls, "call"), plural(len(found.roles), "role"), ", ".join(found.models)]
    lines: list[RenderableType] = [Text(" · ".join(filter(None, head)), style="bold")]
    for role in found.roles:
        lines += ["", *_role(role, found, kinds, wording, full)]
    if found.left_out:
        left = ", ".join(f"{count:,} {why}" for why, count in sorted(found.left_out.items()))
        lines += ["", Text(f"calls left out: {left}", style=BAD if set(found.left_out) - {_ENOUGH} else QUIET)]
    return Group(*lines)


_ENOUGH = "more than are needed"


def _role(
    role: FoundRole, found: FoundParts, kinds: Sequence[Kind], wording: Wording, full: bool
) -> Iterable[RenderableType]:
    yield Text(role.name, style=f"bold {NAME}").append(
        f"  {plural(role.calls, 'call')} of {plural(role.tasks, 'task')}", style=f"not bold {QUIET}"
    )
    parts = found.of(role.name)
    if role.bare:
        yield _note("sends nothing but the task and what others answered: no prompt to improve")
    for one in parts:
        if one.part.kind not in kinds:
            continue
        if one.part.roles[0] != role.name:
            yield _note(f"has {one.part.name}, too")
        else:
            yield from _part(one, role, wording, full)
    if role.inputs:
        yield _note(f"{plural(role.inputs, 'user message')} of one task alone: input, no prompt")
    hidden = Counter(one.part.kind for one in parts if one.part.kind not in kinds)
    if hidden:
        counts = " and ".join(plural(count, *KIND_NAMES[kind]) for kind, count in hidden.items())
        yield _note(f"{counts}: --part {','.join(hidden)} shows them")


def _part(one: FoundPart, role: FoundRole, wording: Wording, full: bool) -> Iterable[RenderableType]:
    part = one.part
    line = Text("  ").append(part.name, style="bold")
    about = [plural(part.now.constant, "character")]
    if part.old.slots:
        about.append(plural(len(part.old.slots), "slot"))
    if (part.support.calls, part.support.tasks) != (role.calls, role.tasks):
        about.append(f"in {plural(part.support.calls, 'call')} of {plural(part.support.tasks, 'task')}")
    yield line.append(f"  {', '.join(about)}", style=QUIET)
    if len(part.roles) > 1:
        yield _note(f"the same in {', '.join(part.roles[1:])}")
    if one.why:
        yield _note(f"cannot be edited: {one.why}", BAD)
    if part.edited:
        yield _note("edited: cotune prompts diff shows what was changed", f"not bold {NAME}")
    yield Padding(_template(part.now, wording, full), (0, 0, 0, 4))
    for slot, values in zip(part.old.slots, one.examples, strict=True):
        for number, value in enumerate(values):
            mark = wording.mark(slot) if not number else " " * len(wording.mark(slot))
            example = Text("      ").append(mark, style=NAME).append(" ")
            yield example.append(snippet(value, _VALUE) if value.strip() else "(empty)", style=QUIET)


def _template(template: Template, wording: Wording, full: bool) -> Text:
    text = Text()
    for piece in template.pieces:
        text.append(piece) if isinstance(piece, str) else text.append(wording.mark(piece), style=NAME)
    text.rstrip()
    lines = text.split("\n")
    if full or len(lines) <= _LINES:
        return text
    cut = Text("\n").join(lines[:_LINES])
    return cut.append(f"\n… {plural(len(lines) - _LINES, 'more line')}: --full shows them", style=QUIET)


def _note(text: str, style: str = QUIET) -> Padding:
    return Padding(Text(text, style=style), (0, 0, 0, 2 if style == QUIET else 4))


def found_of(prompts: Prompts, only: Sequence[str] = ()) -> FoundParts:
    """The parts of a file of prompts, of all roles or some, as `shown_parts` takes them: without values of slots."""
    roles = dict.fromkeys(role for part in prompts.parts for role in part.roles if not only or role in only)
    supports = {name: [part.support for part in prompts.parts if name in part.roles] for name in roles}
    return FoundParts(
        parts=tuple(FoundPart(part=part, examples=((),) * len(part.old.slots)) for part in prompts.parts),
        roles=tuple(
            FoundRole(name=name, calls=max(one.calls for one in of), tasks=max(one.tasks for one in of))
            for name, of in supports.items()
        ),
        workflow=prompts.workflow,
        models=prompts.models,
    )


def parts_as_json(found: FoundParts) -> dict[str, Any]:
    """The parts and roles as one JSON value: texts as lists of constant texts and slot numbers."""
    parts = [
        {
            "name": one.part.name,
            "roles": one.part.roles,
            "kind": one.part.kind,
            "key": one.part.key,
            "old": one.part.old.pieces,
            "calls": one.part.support.calls,
            "tasks": one.part.support.tasks,
            "examples": one.examples,
            "editable": not one.why,
            "why_not": one.why,
        }
        for one in found.parts
    ]
    roles = [
        {"name": role.name, "calls": role.calls, "tasks": role.tasks, "inputs": role.inputs, "bare": role.bare}
        for role in found.roles
    ]
    about = {"workflow": found.workflow, "models": found.models, "left_out": found.left_out}
    return {**about, "roles": roles, "parts": parts}


def shown_diff(pairs: Sequence[tuple[PromptPart, Template, Template]]) -> Group:
    """What was changed in parts, old lines against new ones, with changed words in bold."""
    wording = Wording(PromptPart(name="", roles=(), kind="user", old=old, new=new) for _, old, new in pairs)
    lines: list[RenderableType] = []
    for part, old, new in pairs:
        size = f"{old.constant:,} -> {new.constant:,} characters"
        support = f"{plural(part.support.calls, 'call')} of {plural(part.support.tasks, 'task')}"
        lines += [Text(part.name, style="bold").append(f"  {size}, {support}", style=f"not bold {QUIET}")]
        if len(part.roles) > 1:
            lines.append(Text(f"  roles: {', '.join(part.roles)}", style=QUIET))
        table = Table.grid(padding=(0, 1, 0, 0))
        for sign, line in _changed(wording.text(old), wording.text(new)):
            table.add_row(Text(f"  {sign}", style=line.style), line)
        lines += [table, ""]
    return Group(*lines[:-1])


def _changed(old: str, new: str) -> Iterable[tuple[str, Text]]:
    """Lines with a sign before each; of many that are equal, few."""
    a, b = old.splitlines(), new.splitlines()
    for tag, i, to_i, j, to_j in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            same = a[i:to_i]
            if len(same) > 4:
                same = [*same[:2], f"… {plural(len(same) - 3, 'equal line')}", same[-1]]
            yield from ((" ", Text(line, style=QUIET)) for line in same)
            continue
        gone, come = "\n".join(a[i:to_i]), "\n".join(b[j:to_j])
        yield from (("-", line) for line in _marked(gone, come, BAD) if to_i > i)
        yield from (("+", line) for line in _marked(come, gone, GOOD) if to_j > j)


def _marked(text: str, other: str, style: str) -> Iterable[Text]:
    """The lines of a text, in bold the words that `other` does not have."""
    words, others = _WORDS.findall(text), _WORDS.findall(other)
    marked = Text(style=style)
    for tag, i, to_i, _, _ in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        marked.append("".join(words[i:to_i]), style="" if tag == "equal" else "bold")
    return marked.split("\n", allow_blank=True)
