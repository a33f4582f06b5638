"""Edited prompts, and the edits of one call. A call is edited completely, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from cotune.prompts.chat_texts import Kind, map_body
from cotune.prompts.templates import Reading, Template
from cotune.records.ids import canonical

Outcome = Literal["edited", "prompt_unmatched", "prompt_ambiguous"]
FORMAT = 1
AS_WRITTEN = "as written"
"""Stands for the application's own prompts instead of an id."""


class Support(msgspec.Struct, frozen=True):
    """The number of recorded calls with a part, and of their different tasks."""

    calls: int = 0
    tasks: int = 0


class PromptPart(msgspec.Struct, frozen=True, kw_only=True):
    """One text in the prompts of a role, or of several roles with the same text.

    `key` is "" or the name of the tool or schema and the path in it. `new` is None if the text is unchanged.
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
        """Whether the text was changed."""
        return self.new is not None and self.new != self.old

    @property
    def now(self) -> Template:
        """The present text."""
        return self.old if self.new is None else self.new


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of an application with their edits: the content of `prompts.json`.

    Parts without an edit belong to it too: a text that matches one of them is recognized and not changed.
    """

    parts: tuple[PromptPart, ...]
    workflow: str = ""
    models: tuple[str, ...] = ()
    created: str = ""
    cotune: str = ""
    provenance: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    trained_with: str = ""
    """The id of the prompts with which the weights were trained that answered in the search for these prompts, or
    `AS_WRITTEN`; "" if a provider or an untrained model answered."""
    format: int = FORMAT

    @property
    def id(self) -> str:
        """SHA-256 of the edits; "" without edits."""
        edits: list[list[Any]] = []
        for part in self.parts:
            if part.edited:
                edits.append([part.roles, part.kind, part.key, part.old.pieces, part.now.pieces])
        if not edits:
            return ""
        return hashlib.sha256(canonical(sorted(edits, key=canonical))).hexdigest()

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles with an edited part."""
        roles: dict[str, None] = {}
        for part in self.parts:
            if part.edited:
                roles.update(dict.fromkeys(part.roles))
        return tuple(roles)

    def edits(self, role: str) -> RoleEdits | None:
        """The edits of a role's calls; None if none of its parts is edited."""
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
        """The edits of one call, which collect what happens to its texts."""
        return CallEdits(self)

    def text(self, kind: Kind, key: str, text: str) -> str | None:
        """The replacement for a text; None if it stays."""
        return self.begin().text(kind, key, text)

    def among(self, kind: Kind, key: str) -> list[PromptPart]:
        """The parts that a text at this place may match, with the most constant text first."""
        return self._parts.get((kind, key), [])

    def edits_kind(self, kind: Kind) -> bool:
        """Whether any part of this kind is edited."""
        return any(kind == edited_kind for edited_kind, _ in self._edited)

    def edits_place(self, kind: Kind, key: str) -> bool:
        """Whether a part at this place is edited."""
        return (kind, key) in self._edited


class _Miss(NamedTuple):
    """An edited part, and how many characters of the most similar text match it before the first difference."""

    part: PromptPart
    matching_characters: int


class CallEdits:
    """The edits of one call, and their result. For one thread."""

    def __init__(self, edits: RoleEdits) -> None:
        """`edits` are the edits of the role that makes the call."""
        self._edits = edits
        self._matched: dict[tuple[Kind, str], bool] = {}
        """The places (kind and key) of parts where the call has a text, and whether a text there matches a part."""
        self._closest_miss: _Miss | None = None
        self.edited = 0
        """Number of texts that were changed."""
        self.ambiguous: tuple[str, ...] = ()
        """The edited parts that a text matches in several ways, so that it stays."""

    def text(self, kind: Kind, key: str, text: str) -> str | None:
        """The replacement of one text of a call; None if the text stays. `kind` and `key` are its place in the request.

        A text may match several parts. Then the parts with the most constant text count, as they describe it best. If
        these have different replacements, or the text matches one of them in several ways, the text stays and the call
        counts as ambiguous.
        """
        candidates = self._edits.among(kind, key)
        if not candidates:
            return None
        # 1. The parts that the text matches, each with the values of its slots.
        matches: list[tuple[PromptPart, tuple[str, ...] | Reading]] = []
        most_constant = 0
        for part in candidates:  # the ones with the most constant text first
            if matches and part.old.constant < most_constant:
                break
            values = part.old.match(text)
            if values is not None:
                matches.append((part, values))
                most_constant = part.old.constant
        if matches:
            self._matched[kind, key] = True
        else:
            self._matched.setdefault((kind, key), False)
            self._note_miss(kind, key, text)
            return None
        edited = [part for part, _ in matches if part.edited]
        if not edited:
            return None

        # 2. Their texts with these values. They must all be the same.
        replacements: set[str] = set()
        is_ambiguous = False
        for part, values in matches:
            if isinstance(values, Reading):  # the part matches, but with several values of a slot
                is_ambiguous = True
            else:
                replacements.add(part.now.fill(values))
        if is_ambiguous or len(replacements) > 1:
            self.ambiguous = (*self.ambiguous, edited[0].name)
            return None
        self.edited += 1
        return replacements.pop()

    def _note_miss(self, kind: Kind, key: str, text: str) -> None:
        """Note a text that matches no part, although an edited part belongs at its place.

        Of several texts, `difference` reports the one that matches an edited part the longest from its beginning.
        """
        for part in self._edits.among(kind, key):
            if not part.edited:
                continue
            matching_characters = part.old.reach(text)
            if self._closest_miss is None or matching_characters > self._closest_miss.matching_characters:
                self._closest_miss = _Miss(part, matching_characters)

    @property
    def outcome(self) -> Outcome:
        """`edited` if the call is edited as it should be, otherwise the reason.

        `prompt_ambiguous`: a text matches an edited part in several ways. `prompt_unmatched`: a system message, tool or
        schema should be edited but matches no part, or no text of the call matches. A user message that does not match
        may be the task.
        """
        if self.ambiguous:
            return "prompt_ambiguous"
        has_match_at_edited_place = False
        for (kind, key), is_matched in self._matched.items():
            if not self._edits.edits_place(kind, key):
                continue
            if is_matched:
                has_match_at_edited_place = True
            elif kind != "user":
                return "prompt_unmatched"
        if has_match_at_edited_place:
            return "edited"

        # Every call has messages, so an edit of a message should have matched. But not every call has the tools or the
        # schema of an edit: without them, a call that matches an unedited part is as it should be.
        edits_messages = self._edits.edits_kind("system") or self._edits.edits_kind("user")
        matches_any_part = any(self._matched.values())
        if not edits_messages and matches_any_part:
            return "edited"
        return "prompt_unmatched"

    @property
    def difference(self) -> str:
        """The first difference between an edited part and the most similar text, without its content."""
        miss = self._closest_miss
        if miss is None:
            return "it has no text of that kind"
        return f"{miss.part.name} differs from character {miss.matching_characters + 1} on"


def rewrite_chat(edits: CallEdits, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chat request in OpenAI form with the edits; `body` itself if nothing changes. `body` is never modified."""
    return map_body(body, edits.text)
