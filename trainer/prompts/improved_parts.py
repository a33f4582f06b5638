"""The parts of prompts that a search improves, and the guard that refuses some of their new texts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotune.errors import ConfigError
from cotune.judging.shown import shown_message
from cotune.prompts.edits import PromptPart, Prompts
from cotune.prompts.file import read_prompts
from cotune.prompts.guards import ProtectedTexts, find_refusals
from cotune.prompts.parts import FoundParts, find_parts, patterns
from cotune.prompts.wording import Wording
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.prompts.evaluations import SEARCH, Evaluations
from cotune.trainer.prompts.options import ImproveOptions
from cotune.trainer.prompts.problem import Guard
from cotune.trainer.prompts.task_result import TaskResult
from cotune.trainer.prompts.tasks import SearchTasks

IMPROVED = "improved"
"""Key of the provenance in a file of parts: the names of the parts that a search improves."""


def find_base(evaluations: Evaluations, options: ImproveOptions) -> tuple[Prompts, list[str]]:
    """Find all parts of the application's own prompts. Returns them, with the parts to improve in their provenance,
    and notes for the user."""
    keep = patterns(options.keep, "keep")
    parts = find_parts(evaluations.store, evaluations.store.episodes(EpisodeFilters(phase=SEARCH)), keep=keep)
    to_improve: list[str] = []
    for found_part in parts.editable:
        if found_part.first and _is_of_roles(found_part.part, options):
            to_improve.append(found_part.part.name)
    base = parts.prompts(provenance={IMPROVED: to_improve})
    return msgspec.structs.replace(base, workflow=evaluations.workflow.name), _notes_on_parts(parts, options)


def earlier_base(options: ImproveOptions) -> Prompts:
    """Read the prompts of an earlier search, from which this one starts. Raises ConfigError."""
    base = read_prompts(options.prompts_file or "")
    improved_before = base.provenance.get(IMPROVED)
    to_improve: list[str] = []
    for part in base.parts:
        is_main = part.kind in ("system", "user")
        if improved_before is not None:
            is_main = part.name in improved_before
        if is_main and _is_of_roles(part, options):
            to_improve.append(part.name)
    return msgspec.structs.replace(base, provenance={IMPROVED: to_improve})


def parts_to_improve(base: Prompts) -> tuple[PromptPart, ...]:
    """Return the parts that a search improves."""
    names = base.provenance.get(IMPROVED, ())
    return tuple(part for part in base.parts if part.name in names)


def _is_of_roles(part: PromptPart, options: ImproveOptions) -> bool:
    """Return whether a part is of one of the roles to improve; by default, all roles are improved."""
    return not options.roles or bool(set(options.roles) & set(part.roles))


def _notes_on_parts(parts: FoundParts, options: ImproveOptions) -> list[str]:
    """Return notes on parts that stay as they are, roles without a prompt, and calls that are left out. Raises
    ConfigError for a role that was never called."""
    notes: list[str] = []
    for found_part in parts.parts:
        if found_part.why and found_part.part.kind in ("system", "user"):
            notes.append(f"{found_part.part.name} stays as it is: {found_part.why}")
    for role in parts.roles:
        if role.bare:
            notes.append(f"{role.name} sends nothing but the task: no prompt to improve")
    role_names = [role.name for role in parts.roles]
    if unknown := sorted(set(options.roles) - set(role_names)):
        fault = "is not called in any run"
        raise ConfigError("roles", ", ".join(unknown), fault, f"The roles are: {', '.join(role_names)}.")
    notes += [f"{plural(count, 'call')} left out: {why}" for why, count in parts.left_out.items()]
    return notes


def guard_of(base: Prompts, tasks: SearchTasks, store: Store, options: ImproveOptions) -> Guard:
    """Return the guard of a search. It refuses texts that copy a task or texts of a run, among other things.

    It compares with all tasks, and with the runs from which a text was proposed.
    """
    seen_texts = ProtectedTexts()
    wording = Wording(base.parts)
    for task in (*tasks.train, *tasks.validation, *tasks.held_out):
        seen_texts.task(task)
    for part in base.parts:
        seen_texts.names.update(part.roles)
    added_episodes: set[str] = set()

    def guard(part: PromptPart, present: str, proposed: str, results: Sequence[TaskResult]) -> Sequence[str]:
        for result in results:
            if result.episode not in added_episodes:
                added_episodes.add(result.episode)
                _add_texts(seen_texts, store, result.episode)
        present_part = msgspec.structs.replace(part, new=wording.template(present))
        return [refusal.rule for refusal in find_refusals(present_part, wording.template(proposed), seen_texts)]

    return guard


def _add_texts(seen_texts: ProtectedTexts, store: Store, episode: str) -> None:
    """Add the answers of an episode, the results of its tools, and the names of its tools."""
    for call in store.calls(episode):
        for candidate in call.candidates:
            seen_texts.text(candidate.text)
        for message in map(store.message, call.messages):
            if message.get("role") == "tool":
                seen_texts.text(shown_message(message))
        for tool in store.message(call.tools) if call.tools else ():
            seen_texts.names.add(str((tool.get("function") or tool).get("name")))
