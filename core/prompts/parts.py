"""The parts of each role's prompts: the constant text of its recorded calls, with slots where they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, get_args

import msgspec

from cotune.errors import ConfigError
from cotune.prompts.chat_texts import Kind
from cotune.prompts.edits import PromptPart, Prompts, Support
from cotune.prompts.grouping import Group, grouped
from cotune.prompts.recorded import CALLS, Place, Recorded, SeenText, read_texts
from cotune.prompts.templates import Reading, Template
from cotune.records.structs import Episode
from cotune.storage.protocol import Store

KINDS: tuple[Kind, ...] = get_args(Kind)
TASKS = 2
"""Least tasks from which a prompt can be told from its input."""
CONSTANT = 20
"""Least constant characters of a part that is worth an edit."""
_EXAMPLES = 2


class FoundPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part as it was found. `examples` are up to two values of each slot. `why` says why it cannot be edited, and is
    "" where it can. `first` marks what is edited unless more is asked for: system messages, and user messages of roles
    that have none."""

    part: PromptPart
    examples: tuple[tuple[str, ...], ...] = ()
    why: str = ""
    first: bool = False


class FoundRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role of the records: its calls, their tasks, and the texts of user messages that are in one task alone and
    count as input. `bare`: it sends nothing but its task and what others have answered."""

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
        """All parts as prompts that say what they said; `more` are further fields."""
        return Prompts(
            parts=tuple(found.part for found in self.parts), workflow=self.workflow, models=self.models, **more
        )


@dataclass(frozen=True)
class _Found:
    """A prompt of one place."""

    place: Place
    group: Group
    template: Template
    order: tuple[int, int]
    blocked: bool = False
    """One of its texts also reads as another part."""


def patterns(texts: Iterable[str], field: str) -> list[re.Pattern[str]]:
    """Regular expressions of text that stays as it is, as `find_parts` takes them. Raises ConfigError that names
    `field`."""
    found = []
    for text in texts:
        try:
            found.append(re.compile(text))
        except re.error as error:
            raise ConfigError(field, text, f"is no regular expression: {error}") from None
    return found


def find_parts(
    store: Store,
    episodes: Iterable[Episode] | None = None,
    *,
    roles: Sequence[str] = (),
    kinds: Sequence[Kind] = KINDS,
    keep: Sequence[re.Pattern[str]] = (),
    calls: int = CALLS,
) -> FoundParts:
    """The parts of recorded prompts: of these episodes, or of all. What matches a pattern of `keep` becomes a slot, so
    that it stays as it is. No more than `calls` calls are read.
    """
    recorded = read_texts(store, episodes, keep=keep, calls=calls)
    found: list[_Found] = []
    inputs: dict[str, int] = {}
    for place, texts in recorded.texts.items():
        if (not roles or place.role in roles) and place.kind in kinds:
            many = len(recorded.roles[place.role].tasks) >= TASKS
            ours, theirs = _of_place(place, list(texts.values()), many)
            found += ours
            inputs[place.role] = inputs.get(place.role, 0) + theirs
    parts = _named(found)
    has_system = {role for one in parts if one.part.kind == "system" and not one.why for role in one.part.roles}
    parts = [msgspec.structs.replace(one, first=not one.why and _is_first(one.part, has_system)) for one in parts]
    return FoundParts(
        parts=tuple(parts),
        roles=tuple(_role(name, recorded, inputs, parts) for name in recorded.roles if not roles or name in roles),
        left_out=dict(recorded.left_out),
        workflow=next(iter(recorded.workflows)) if len(recorded.workflows) == 1 else "",
        models=tuple(sorted(recorded.models)),
    )


def _is_first(part: PromptPart, has_system: set[str]) -> bool:
    return part.kind == "system" or (part.kind == "user" and not has_system & set(part.roles))


def _of_place(place: Place, texts: Sequence[SeenText], many: bool) -> tuple[list[_Found], int]:
    """The prompts of a place, and how many texts are none: user messages of one task, where the role has `many`."""
    found: list[_Found] = []
    inputs = 0
    for group in grouped(texts):
        if place.kind in ("user", "assistant") and many and len(group.tasks) < TASKS:
            inputs += len(group.texts) if place.kind == "user" else 0
            continue
        template = group.template()
        if template.constant:
            found.append(_Found(place, group, template, min(text.order for text in group.texts)))
    return [_apart(one, found) for one in found], inputs


def why_not(kind: Kind, old: Template, tasks: int) -> str:
    """Why a text that was seen in so many tasks cannot be edited; "" where it can."""
    if kind == "assistant":
        return "an example of an answer stays as it is: in a request nothing tells it from a real answer"
    if tasks < TASKS:
        return "seen in one task: what is constant cannot be told from its input"
    if old.constant < CONSTANT:
        return f"only {old.constant} characters are constant"
    return ""


def _apart(one: _Found, all_found: Sequence[_Found]) -> _Found:
    """A prompt whose texts are no other's: with the most constant text, it reads each of them alone."""
    rivals = [
        other
        for other in all_found
        if other is not one and other.template.constant >= one.template.constant and other.template != one.template
    ]
    blocked = any(other.template.match(text.text) is not None for other in rivals for text in one.group.texts)
    return replace(one, blocked=blocked)


def _named(found: Iterable[_Found]) -> list[FoundPart]:
    """Parts with names, in the order of their roles, kinds and places; the same text of several roles is one part."""
    same: dict[tuple[str, str, Template], list[_Found]] = {}
    for one in found:
        same.setdefault((one.place.kind, one.place.key, one.template), []).append(one)
    roles = {role: number for number, role in enumerate(dict.fromkeys(one.place.role for one in found))}

    def base(alike: list[_Found]) -> tuple[int, int, str]:
        place = alike[0].place
        return roles[place.role], KINDS.index(place.kind), place.key

    ordered = sorted(same.values(), key=lambda alike: (*base(alike), alike[0].order, str(alike[0].template.pieces)))
    parts: list[FoundPart] = []
    for _, group in groupby(ordered, key=base):
        parts += [_part(alike, number) for number, alike in enumerate(group, 1)]
    return parts


def _part(alike: Sequence[_Found], number: int) -> FoundPart:
    role, kind, key = alike[0].place
    name = ".".join([role, kind, *([key] if key else []), *([str(number)] if number > 1 else [])])
    template = alike[0].template
    calls = {call for one in alike for call in one.group.calls}
    tasks = {task for one in alike for task in one.group.tasks}
    blocked = "one of its texts also reads as another part" if any(one.blocked for one in alike) else ""
    part = PromptPart(
        name=name,
        roles=tuple(one.place.role for one in alike),
        kind=kind,
        key=key,
        old=template,
        support=Support(calls=len(calls), tasks=len(tasks)),
    )
    texts = sorted((text for one in alike for text in one.group.texts), key=lambda text: min(text.calls))
    values = [read for text in texts if (read := _read(template, text)) is not None]
    examples = tuple(tuple(_examples(row[slot - 1] for row in values)) for slot in template.slots)
    return FoundPart(part=part, examples=examples, why=blocked or why_not(kind, template, len(tasks)))


def _read(template: Template, text: SeenText) -> tuple[str, ...] | None:
    values = template.match(text.text)
    return None if isinstance(values, Reading) else values


def _examples(values: Iterable[str]) -> list[str]:
    """Different values, those that are not empty first."""
    different = list(dict.fromkeys(values))
    return sorted(different, key=lambda value: not value)[:_EXAMPLES]


def _role(name: str, recorded: Recorded, inputs: Mapping[str, int], parts: Sequence[FoundPart]) -> FoundRole:
    seen = recorded.roles[name]
    return FoundRole(
        name=name,
        calls=len(seen.calls),
        tasks=len(seen.tasks),
        inputs=inputs.get(name, 0),
        bare=not any(name in one.part.roles and one.part.kind in ("system", "user") for one in parts),
    )
