"""The parts of each role's prompts: the constant text of its recorded calls, with slots where they differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import msgspec

from cotune.errors import ConfigError
from cotune.prompts.chat_texts import Kind
from cotune.prompts.edits import PromptPart, Prompts, Support
from cotune.prompts.grouping import Group, group_texts
from cotune.prompts.recorded import CALLS, Place, Recorded, SeenText, read_texts
from cotune.prompts.templates import Template
from cotune.records.structs import Episode
from cotune.storage.protocol import Store

KINDS: tuple[Kind, ...] = get_args(Kind)
TASKS = 2
"""Minimum number of tasks to distinguish a prompt from its input."""
CONSTANT = 20
"""Minimum constant characters of a part that is worth an edit."""
_EXAMPLES = 2


class FoundPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of recorded prompts. `examples` are up to two values of each slot. `why` is the reason if the part cannot
    be edited, else "". `first` marks the parts that are edited by default: system messages, and user messages of roles
    without system messages."""

    part: PromptPart
    examples: tuple[tuple[str, ...], ...] = ()
    why: str = ""
    first: bool = False


class FoundRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role of the records: the numbers of its calls, of their tasks, and of user messages that occur in only one task
    and count as input. `bare` is whether it sends only its task and the answers of others."""

    name: str
    calls: int
    tasks: int
    inputs: int = 0
    bare: bool = False


class FoundParts(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of an application's prompts, its roles, and the calls that were left out, by reason."""

    parts: tuple[FoundPart, ...]
    roles: tuple[FoundRole, ...]
    left_out: Mapping[str, int] = {}
    workflow: str = ""
    models: tuple[str, ...] = ()

    def of(self, role: str) -> list[FoundPart]:
        """The parts of a role."""
        return [found for found in self.parts if role in found.part.roles]

    @property
    def editable(self) -> tuple[FoundPart, ...]:
        """The parts that can be edited."""
        return tuple(found for found in self.parts if not found.why)

    def prompts(self, **more: Any) -> Prompts:
        """All parts as prompts without edits. `more` are further fields."""
        return Prompts(
            parts=tuple(found.part for found in self.parts), workflow=self.workflow, models=self.models, **more
        )


@dataclass(frozen=True)
class _PlacedPrompt:
    """A prompt at one place."""

    place: Place
    group: Group
    template: Template
    order: tuple[int, int]
    blocked: bool = False
    """Whether one of its texts also matches another part."""


def patterns(texts: Iterable[str], field: str) -> list[re.Pattern[str]]:
    """Compiled regular expressions of text that must not change, for `find_parts`. Raises ConfigError for `field`."""
    compiled = []
    for text in texts:
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            raise ConfigError(field, text, f"is not a regular expression: {error}") from None
    return compiled


def find_parts(
    store: Store,
    episodes: Iterable[Episode] | None = None,
    *,
    roles: Sequence[str] = (),
    kinds: Sequence[Kind] = KINDS,
    keep: Sequence[re.Pattern[str]] = (),
    calls: int = CALLS,
) -> FoundParts:
    """The parts of recorded prompts, from these episodes or from all. Text that matches a pattern of `keep` becomes a
    slot, so that it cannot be changed. At most `calls` calls are read.
    """
    recorded = read_texts(store, episodes, keep=keep, calls=calls)
    shown_roles = [name for name in recorded.roles if not roles or name in roles]
    prompts: list[_PlacedPrompt] = []
    inputs_of_role: Counter[str] = Counter()
    for place, texts in recorded.texts.items():
        if place.role in shown_roles and place.kind in kinds:
            has_two_tasks = len(recorded.roles[place.role].tasks) >= TASKS
            place_texts = _prompts_at(place, list(texts.values()), has_two_tasks)
            prompts += place_texts.prompts
            inputs_of_role[place.role] += place_texts.inputs
    parts = _mark_first_parts(_name_prompts(prompts))
    return FoundParts(
        parts=tuple(parts),
        roles=tuple(_found_role(name, recorded, inputs_of_role[name], parts) for name in shown_roles),
        left_out=dict(recorded.left_out),
        workflow=next(iter(recorded.workflows)) if len(recorded.workflows) == 1 else "",
        models=tuple(sorted(recorded.models)),
    )


def _mark_first_parts(found_parts: Sequence[FoundPart]) -> list[FoundPart]:
    """Set `first` of the parts that are edited by default: system messages, and user messages of roles without a
    system message that can be edited."""
    roles_with_system: set[str] = set()
    for found_part in found_parts:
        if found_part.part.kind == "system" and not found_part.why:
            roles_with_system.update(found_part.part.roles)
    marked_parts: list[FoundPart] = []
    for found_part in found_parts:
        part = found_part.part
        is_first = part.kind == "system"
        if part.kind == "user":
            is_first = roles_with_system.isdisjoint(part.roles)
        can_be_edited = not found_part.why
        marked_parts.append(msgspec.structs.replace(found_part, first=is_first and can_be_edited))
    return marked_parts


class _PlaceTexts(NamedTuple):
    """The texts at one place of a role's calls, such as its system message."""

    prompts: list[_PlacedPrompt]
    inputs: int
    """Number of user messages that are the input of a task, and not a prompt."""


def _prompts_at(place: Place, texts: Sequence[SeenText], has_two_tasks: bool) -> _PlaceTexts:
    """The prompts among the texts at one place.

    If the role has two tasks or more, a user message that occurs in only one of them is the task's input, not a prompt.
    An answer that occurs in only one is left out, too.
    """
    prompts: list[_PlacedPrompt] = []
    inputs = 0
    for group in group_texts(texts):
        may_be_input = place.kind in ("user", "assistant")
        if may_be_input and has_two_tasks and len(group.tasks) < TASKS:
            if place.kind == "user":
                inputs += len(group.texts)
            continue
        template = group.template()
        if template.constant:
            first_seen = min(text.order for text in group.texts)
            prompts.append(_PlacedPrompt(place, group, template, first_seen))
    # Only now are all prompts known that a text could match instead of its own.
    prompts = [replace(prompt, blocked=_matches_rival(prompt, prompts)) for prompt in prompts]
    return _PlaceTexts(prompts, inputs)


def why_not(kind: Kind, old: Template, tasks: int) -> str:
    """The reason why a text that occurs in this number of tasks cannot be edited; "" if it can."""
    if kind == "assistant":
        return "an example of an answer cannot be changed: in a request it looks like a real answer"
    if tasks < TASKS:
        return "seen in one task: its constant text cannot be distinguished from its input"
    if old.constant < CONSTANT:
        return f"only {old.constant} characters are constant"
    return ""


def _matches_rival(prompt: _PlacedPrompt, prompts: Sequence[_PlacedPrompt]) -> bool:
    """Whether one of the prompt's texts also matches another prompt with at least as much constant text.

    A request with this text would get the other prompt's edits, so the prompt cannot be edited.
    """
    for other in prompts:
        if other is prompt or other.template == prompt.template:
            continue
        if other.template.constant < prompt.template.constant:
            continue
        if any(other.template.match(text.text) is not None for text in prompt.group.texts):
            return True
    return False


def _name_prompts(prompts: Sequence[_PlacedPrompt]) -> list[FoundPart]:
    """Give each prompt a name, and make one part of a text that several roles have.

    Names count within a role, kind and key (`writer.system`, `writer.system.2`), in the order in which texts were seen.
    """
    # A part is a list of prompts with the same text, of different roles. It is named after the first of these roles.
    parts_by_text: dict[tuple[str, str, Template], list[_PlacedPrompt]] = {}
    role_numbers: dict[str, int] = {}
    for prompt in prompts:
        parts_by_text.setdefault((prompt.place.kind, prompt.place.key, prompt.template), []).append(prompt)
        role_numbers.setdefault(prompt.place.role, len(role_numbers))

    def order(same_text: list[_PlacedPrompt]) -> tuple[int, int, str, tuple[int, int], str]:
        first = same_text[0]
        role, kind, key = first.place
        return role_numbers[role], KINDS.index(kind), key, first.order, str(first.template.pieces)

    found_parts: list[FoundPart] = []
    number_at_place: Counter[Place] = Counter()
    for same_text in sorted(parts_by_text.values(), key=order):
        place = same_text[0].place
        number_at_place[place] += 1
        found_parts.append(_found_part(same_text, number_at_place[place]))
    return found_parts


def _found_part(same_text: Sequence[_PlacedPrompt], number: int) -> FoundPart:
    """The part for prompts of one or more roles with the same text; `number` counts the parts at its place, from 1.

    It gets examples of the values of its slots, and, if the text must not be edited, the reason.
    """
    role, kind, key = same_text[0].place
    name = f"{role}.{kind}"
    if key:
        name += f".{key}"
    if number > 1:
        name += f".{number}"
    template = same_text[0].template
    calls: set[str] = set()
    tasks: set[str] = set()
    texts: list[SeenText] = []
    for prompt in same_text:
        calls |= prompt.group.calls
        tasks |= prompt.group.tasks
        texts += prompt.group.texts
    part = PromptPart(
        name=name,
        roles=tuple(prompt.place.role for prompt in same_text),
        kind=kind,
        key=key,
        old=template,
        support=Support(calls=len(calls), tasks=len(tasks)),
    )
    reason = why_not(kind, template, len(tasks))
    if any(prompt.blocked for prompt in same_text):
        reason = "one of its texts also matches another part"
    return FoundPart(part=part, examples=_examples_of_slots(template, texts), why=reason)


def _examples_of_slots(template: Template, texts: Iterable[SeenText]) -> tuple[tuple[str, ...], ...]:
    """For each slot of a template, examples of the values that it has in these texts, in the order of their calls."""
    values_of_slots: list[list[str]] = [[] for _ in template.slots]
    for text in sorted(texts, key=lambda text: min(text.calls)):
        values = template.match(text.text)
        if isinstance(values, tuple):  # else the text matches in several ways, or not
            for slot, values_of_slot in zip(template.slots, values_of_slots, strict=True):
                values_of_slot.append(values[slot - 1])
    return tuple(tuple(_distinct_examples(values)) for values in values_of_slots)


def _distinct_examples(values: Iterable[str]) -> list[str]:
    """Different values, non-empty ones first."""
    different = list(dict.fromkeys(values))
    return sorted(different, key=lambda value: not value)[:_EXAMPLES]


def _found_role(name: str, recorded: Recorded, inputs: int, parts: Sequence[FoundPart]) -> FoundRole:
    """The role `name` with the numbers of its calls and tasks, and with what it sends besides prompts.

    `inputs` is the number of its user messages that occur in only one task, so that they are input.
    """
    recorded_calls = recorded.roles[name]
    of_role = [found_part.part for found_part in parts if name in found_part.part.roles]
    return FoundRole(
        name=name,
        calls=len(recorded_calls.calls),
        tasks=len(recorded_calls.tasks),
        inputs=inputs,
        bare=not any(part.kind in ("system", "user") for part in of_role),
    )
