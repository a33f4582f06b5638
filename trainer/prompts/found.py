"""The parts that a search improves, and what a text for them may not do."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotune.errors import ConfigError
from cotune.judging.shown import shown_message
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.file import read_prompts
from cotune.prompts.guards import Known, refusals
from cotune.prompts.parts import FoundParts, find_parts, patterns
from cotune.prompts.wording import Wording
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.prompts.evaluations import SEARCH, Evaluations
from cotune.trainer.prompts.options import ImproveOptions
from cotune.trainer.prompts.problem import Guard
from cotune.trainer.prompts.tasks import SearchTasks
from cotune.trainer.prompts.tried import Tried

IMPROVED = "improved"
"""Key of the provenance under which a file of parts names those that a search improves."""


def find_base(evaluations: Evaluations, options: ImproveOptions) -> tuple[Prompts, list[str]]:
    """All parts of the application's prompts, as it has them, and what is to be said of them. Its provenance names the
    parts that are to be improved."""
    keep = patterns(options.keep, "keep")
    found = find_parts(evaluations.store, evaluations.store.episodes(EpisodeFilters(phase=SEARCH)), keep=keep)
    wanted = [one.part.name for one in found.editable if one.first and _of(one.part, options)]
    base = found.prompts(provenance={IMPROVED: wanted})
    return msgspec.structs.replace(base, workflow=evaluations.workflow.name), _notes(found, wanted, options)


def earlier_base(options: ImproveOptions) -> Prompts:
    """The prompts of an earlier search, from which this one starts. Raises ConfigError."""
    base = read_prompts(options.prompts_file or "")
    improved_before = base.provenance.get(IMPROVED)
    wanted = []
    for part in base.parts:
        first = part.kind in ("system", "user") if improved_before is None else part.name in improved_before
        if first and _of(part, options):
            wanted.append(part.name)
    return msgspec.structs.replace(base, provenance={IMPROVED: wanted})


def improved(base: Prompts) -> tuple[PromptPart, ...]:
    """The parts that a search improves."""
    names = base.provenance.get(IMPROVED, ())
    return tuple(part for part in base.parts if part.name in names)


def _of(part: PromptPart, options: ImproveOptions) -> bool:
    return not options.roles or bool(set(options.roles) & set(part.roles))


def _notes(found: FoundParts, wanted: Sequence[str], options: ImproveOptions) -> list[str]:
    notes = [
        f"{one.part.name} stays as it is: {one.why}"
        for one in found.parts
        if one.why and one.part.kind in ("system", "user")
    ]
    notes += [f"{role.name} sends nothing but the task: no prompt to improve" for role in found.roles if role.bare]
    if unknown := sorted(set(options.roles) - {role.name for role in found.roles}):
        known = ", ".join(role.name for role in found.roles)
        raise ConfigError("roles", ", ".join(unknown), "is called in no run", f"The roles are: {known}.")
    notes += [f"{plural(count, 'call')} left out: {why}" for why, count in found.left_out.items()]
    return notes


def guard_of(base: Prompts, tasks: SearchTasks, store: Store, options: ImproveOptions) -> Guard:
    """Refuses what copies a task or what runs have said, among other things. It knows all tasks, and of runs those that
    proposals were made from."""
    known, wording = Known(), Wording(base.parts)
    for task in (*tasks.train, *tasks.validation, *tasks.held_out):
        known.task(task)
    known.names.update(role for part in base.parts for role in part.roles)
    read: set[str] = set()

    def guard(part: PromptPart, now: str, text: str, tried: Sequence[Tried]) -> Sequence[str]:
        for one in tried:
            if one.episode not in read:
                read.add(one.episode)
                _learn(known, store, one.episode)
        at_present = msgspec.structs.replace(part, new=wording.template(now))
        found = refusals(at_present, wording.template(text), known)
        return [one.rule for one in found]

    return guard


def _learn(known: Known, store: Store, episode: str) -> None:
    """Take in what was answered in an episode, what its tools returned, and what they are called."""
    for call in store.calls(episode):
        for candidate in call.candidates:
            known.text(candidate.text)
        for message in map(store.message, call.messages):
            if message.get("role") == "tool":
                known.text(shown_message(message))
        for tool in store.message(call.tools) if call.tools else ():
            known.names.add(str((tool.get("function") or tool).get("name")))
