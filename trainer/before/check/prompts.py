"""What a dry run tells of prompts: the parts of each role, and roles without any."""

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
    """Whether edited prompts fit the calls of a dry run, part by part."""
    found = read_uses(store, calls, prompts)
    again = "If the application's prompts were changed, find them again: cotune prompts show, or improve."
    told = []
    for use in found.parts:
        part = use.part
        if not use.calls:
            text = f"{part.name}: its role made no call in the dry run, so nothing is known of it."
            yield Finding("warns", "prompts", text, "Take more tasks (--limit), or other answers (--answers).")
        elif not use.matched:
            text = f"{part.name} is unmatched: none of {plural(use.calls, 'call')} of {', '.join(part.roles)} has it"
            where = f"the nearest text differs from character {use.reach + 1} on" if use.reach else "no text begins so"
            yield Finding("blocks", "prompts", f"{text}; {where}.", again)
        else:
            told.append(f"{part.name} in {use.matched} of {plural(use.calls, 'call')}")
    for role, count in found.unedited.items():
        if any(use.matched for use in found.parts if role in use.part.roles):
            text = f"{plural(count, 'call')} of {role} would go out unedited (prompt_unmatched)."
            yield Finding("warns", "prompts", text, again)
    if told:
        yield Finding("ok", "prompts", f"edited parts that match: {', '.join(told)}.")
    elif not found.parts:
        yield Finding("note", "prompts", "the file of prompts has no edited part.")


def prompt_findings(store: Store) -> Iterator[Finding]:
    """How many parts each role's prompts have, and which roles send nothing but the task."""
    found = find_parts(store)
    told = []
    for role in found.roles:
        kinds = Counter(one.part.kind for one in found.of(role.name))
        parts = ", ".join(plural(kinds[kind], *names) for kind, names in KIND_NAMES.items() if kinds[kind])
        told += [f"{role.name}: {parts}"] if parts else []
        if role.bare:
            text = f"{role.name} sends nothing but its input: it has no prompt that could be improved."
            yield Finding("warns", "prompts", text, "If that is meant, leave it so; else give it instructions.")
    if told:
        remedy = "They are shown by: cotune prompts show."
        if max(role.tasks for role in found.roles) < TASKS:
            remedy += " Run with --limit 2 to see which text is the same for all tasks."
        yield Finding("note", "prompts", f"{'; '.join(told)}.", remedy)
