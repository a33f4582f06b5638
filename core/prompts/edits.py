"""Edited prompts, and the edit of one call: right, or left alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cotune.prompts.chat_texts import Kind, map_body
from cotune.prompts.templates import AMBIGUOUS, Template
from cotune.records.ids import canonical

Outcome = Literal["edited", "prompt_unmatched", "prompt_ambiguous"]
FORMAT = 1
AS_WRITTEN = "as written"
"""In place of an id: the application's own prompts."""


class Support(msgspec.Struct, frozen=True):
    """On how much a part rests: the recorded calls in which it stood, and the different tasks of these."""

    calls: int = 0
    tasks: int = 0


class PromptPart(msgspec.Struct, frozen=True, kw_only=True):
    """One text of the prompts of one role, or of several that have the same.

    `key` is "" or names the tool or the schema, and the place in it. `new` is None where the text is as it was.
    """

    name: str
    roles: tuple[str, ...]
    kind: Kind
    old: Template
    key: str = ""
    new: Template | None = None
    support: Support = Support()

    @property
    def edited(self) -> bool:
        """Whether it says something else than before."""
        return self.new is not None and self.new != self.old

    @property
    def now(self) -> Template:
        """What it says."""
        return self.old if self.new is None else self.new


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of an application, with their edits: what `prompts.json` holds.

    Parts that are not edited belong to it: a text that is one of them is known, and left alone.
    """

    parts: tuple[PromptPart, ...]
    workflow: str = ""
    models: tuple[str, ...] = ()
    created: str = ""
    cotune: str = ""
    provenance: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    trained_with: str = ""
    """The id of the prompts that the weights were trained under, for which these were found, or `AS_WRITTEN`; "" where
    a provider or an untrained model answered."""
    format: int = FORMAT

    @property
    def id(self) -> str:
        """SHA-256 over what is edited; "" where nothing is."""
        edited = [
            [part.roles, part.kind, part.key, part.old.pieces, part.now.pieces] for part in self.parts if part.edited
        ]
        return hashlib.sha256(canonical(sorted(edited, key=canonical))).hexdigest() if edited else ""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that have an edited part."""
        return tuple(dict.fromkeys(role for part in self.parts if part.edited for role in part.roles))

    def edits(self, role: str) -> RoleEdits | None:
        """The edits of a role's calls; None where none of its parts is edited."""
        parts = tuple(part for part in self.parts if role in part.roles)
        return RoleEdits(parts) if any(part.edited for part in parts) else None


class RoleEdits:
    """The edits of all calls of one role; safe from any thread."""

    def __init__(self, parts: tuple[PromptPart, ...]) -> None:
        self._parts: dict[tuple[str, str], list[PromptPart]] = {}
        for part in sorted(parts, key=lambda part: -part.old.constant):
            self._parts.setdefault((part.kind, part.key), []).append(part)
        self._edited = {(part.kind, part.key) for part in parts if part.edited}

    def begin(self) -> CallEdits:
        """The edits of one call, which counts what it meets."""
        return CallEdits(self)

    def text(self, kind: Kind, key: str, text: str) -> str | None:
        """What stands in place of a text; None where it stays."""
        return self.begin().text(kind, key, text)

    def among(self, kind: Kind, key: str) -> list[PromptPart]:
        """The parts that a text of this place may be, those with the most constant text first."""
        return self._parts.get((kind, key), [])

    def edits(self, kind: Kind, key: str | None = None) -> bool:
        """Whether a part of this kind is edited, or of this place."""
        return any(kind == place[0] and key in (None, place[1]) for place in self._edited)


class CallEdits:
    """The edits of one call, and what came of them. For one thread."""

    def __init__(self, edits: RoleEdits) -> None:
        self._edits = edits
        self._known: dict[tuple[Kind, str], bool] = {}
        """The places of parts where the call has a text, and whether one of these is known."""
        self._missed: tuple[PromptPart, str] | None = None
        self.edited = 0
        """Texts that were changed."""
        self.ambiguous: tuple[str, ...] = ()
        """The edited parts that a text can be read as in several ways: it stays."""

    def text(self, kind: Kind, key: str, text: str) -> str | None:
        """What stands in place of a text; None where it stays.

        It is taken as the part with the most constant text that it can be read as. Where that has several readings, or
        two such parts say different things, it stays.
        """
        among = self._edits.among(kind, key)
        if not among:
            return None
        found = [(part, values) for part in among if (values := part.old.match(text)) is not None]
        found = [(part, values) for part, values in found if part.old.constant == found[0][0].old.constant]
        self._known[kind, key] = self._known.get((kind, key), False) or bool(found)
        if not found:
            self._miss(kind, key, text)
            return None
        edited = [part for part, _ in found if part.edited]
        if not edited:
            return None
        new = {text if values is AMBIGUOUS else part.now.fill(values) for part, values in found}
        if len(new) > 1 or any(values is AMBIGUOUS for _, values in found):
            self.ambiguous = (*self.ambiguous, edited[0].name)
            return None
        self.edited += 1
        return new.pop()

    def _miss(self, kind: Kind, key: str, text: str) -> None:
        if not self._edits.edits(kind, key):
            return
        edited = [part for part in self._edits.among(kind, key) if part.edited]
        best = max(edited, key=lambda part: part.old.reach(text))
        if self._missed is None or best.old.reach(text) > self._missed[0].old.reach(self._missed[1]):
            self._missed = best, text

    @property
    def outcome(self) -> Outcome:
        """Whether the call is edited as it should be.

        It is not where an edited part has several readings; where the call has a system message, a tool or a schema
        that should be edited, and it is none that is known; nor where no text of it is known. A user message that is
        unknown may be the task.
        """
        if self.ambiguous:
            return "prompt_ambiguous"
        places = {place: known for place, known in self._known.items() if self._edits.edits(*place)}
        if any(not known and kind != "user" for (kind, _), known in places.items()):
            return "prompt_unmatched"
        if any(places.values()):
            return "edited"
        # A call without the tool, or the schema, that is edited.
        only_others = not self._edits.edits("system") and not self._edits.edits("user")
        return "edited" if only_others and any(self._known.values()) else "prompt_unmatched"

    @property
    def difference(self) -> str:
        """Where the text that came nearest to an edited part first differs from it, without its content."""
        if self._missed is None:
            return "it has no text of that kind"
        part, text = self._missed
        return f"{part.name} differs from character {part.old.reach(text) + 1} on"


def rewrite_chat(edits: CallEdits, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chat request in OpenAI form with the edits; `body` itself where nothing changes, of which nothing ever is."""
    return map_body(body, edits.text)
