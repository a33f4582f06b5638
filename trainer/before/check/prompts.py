"""Findings of a dry run about prompts: the parts of each role's prompts, and roles without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cotune.prompts.chat_texts import KIND_NAMES
from cotune.prompts.edits import Prompts
from cotune.prompts.parts import TASKS, find_parts
from cotune.prompts.use import read_uses
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.before.findings import Finding


def use_findings(store: Store, calls: Sequence[CallRecord], prompts: Prompts) -> Iterator[Finding]:
    """Yield findings on whether edited prompts fit the calls of a dry run, part by part."""
    uses = read_uses(store, calls, prompts)
    remedy = "If the application's prompts were changed, find them again: cotune prompts show, or improve."
    matching: list[str] = []
    for use in uses.parts:
        part = use.part
        if not use.calls:
            text = f"{part.name}: its role made no call in the dry run, so nothing is known of it."
            yield Finding("warns", "prompts", text, "Take more tasks (--limit), or other answers (--answers).")
        elif not use.matched:
            text = f"{part.name} is unmatched: none of {plural(use.calls, 'call')} of {', '.join(part.roles)} has it"
            where = f"the nearest text differs from character {use.reach + 1} on" if use.reach else "no text begins so"
            yield Finding("blocks", "prompts", f"{text}; {where}.", remedy)
        else:
            matching.append(f"{part.name} in {use.matched} of {plural(use.calls, 'call')}")
    for role, count in uses.unedited.items():
        if any(use.matched for use in uses.parts if role in use.part.roles):
            text = f"{plural(count, 'call')} of {role} would be sent unedited (prompt_unmatched)."
            yield Finding("warns", "prompts", text, remedy)
    if matching:
        yield Finding("ok", "prompts", f"edited parts that match: {', '.join(matching)}.")
    elif not uses.parts:
        yield Finding("note", "prompts", "the file of prompts has no edited part.")


def prompt_findings(store: Store) -> Iterator[Finding]:
    """Yield the number of parts of each role's prompts, and roles that send nothing but the task."""
    all_parts = find_parts(store)
    by_role: list[str] = []
    for role in all_parts.roles:
        kinds = Counter(role_part.part.kind for role_part in all_parts.of(role.name))
        counts = [plural(kinds[kind], *names) for kind, names in KIND_NAMES.items() if kinds[kind]]
        if counts:
            by_role.append(f"{role.name}: {', '.join(counts)}")
        if role.bare:
            text = f"{role.name} sends nothing but its input: it has no prompt that could be improved."
            yield Finding("warns", "prompts", text, "If that is intended, ignore this; else give it instructions.")
    if by_role:
        remedy = "They are shown by: cotune prompts show."
        if max(role.tasks for role in all_parts.roles) < TASKS:
            remedy += " Run with --limit 2 to see which text is the same for all tasks."
        yield Finding("note", "prompts", f"{'; '.join(by_role)}.", remedy)
