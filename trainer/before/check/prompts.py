"""What a dry run tells of prompts: the parts of each role, and roles without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cotune.prompts.chat_texts import KIND_NAMES
from cotune.prompts.parts import TASKS, find_parts
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.before.findings import Finding


def prompt_findings(store: Store, workflow: str, tasks: str) -> Iterator[Finding]:
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
        remedy = f"They are shown by: cotune prompts show {workflow} --tasks {tasks}."
        if max(role.tasks for role in found.roles) < TASKS:
            remedy += " With --limit 2, what is constant in them can be told from their input."
        yield Finding("note", "prompts", f"{'; '.join(told)}.", remedy)
