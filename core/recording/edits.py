"""The edit of a call: its request with the prompts of its role in place of the application's own.

The application's request stays as it is, and is what is recorded as asked. What goes out is a request of its own, which
shares with it all that no prompt changes. A call that does not have the texts as the prompts know them goes out as the
application asked it, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from cotune.prompts.chat_texts import Kind, map_body
from cotune.prompts.edits import Prompts, RoleEdits, rewrite_chat
from cotune.records.ids import canonical

UNMATCHED = "prompt_unmatched"


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """The part of a chat request that prompts may change, as it goes out."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    params: dict[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Outgoing:
        """That of a chat request in OpenAI form."""
        params = {name: value for name, value in body.items() if name not in ("messages", "tools", "model", "stream")}
        return cls(list(body.get("messages") or ()), body.get("tools") or None, params)


class Asked(Protocol):
    """A call, as far as its edit concerns it."""

    role: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    params: dict[str, Any]
    prompts: str
    unedited: str
    edits: RoleEdits | None
    rewritten: Outgoing | None


class Prompting:
    """The prompts of an episode, applied to its calls; safe from any thread."""

    def __init__(self, prompts: Prompts) -> None:
        self.id = prompts.id
        self._prompts = prompts
        self._roles: dict[str, RoleEdits | None] = {}

    def of(self, role: str) -> RoleEdits | None:
        """The edits of a role; None where it has none."""
        if role not in self._roles:
            self._roles[role] = self._prompts.edits(role)
        return self._roles[role]

    def edit(self, call: Asked, body: Mapping[str, Any], warn: Callable[..., None], role: str = "") -> None:
        """Set what goes out for a call that asks `body`. A call whose texts are not those that the prompts know goes
        out as it is; `warn` counts it. `role` is the role of the call, where the prompts know it by another name."""
        role = role or call.role
        edits = self.of(role)
        if edits is None:
            return
        call.prompts = self.id
        met = edits.begin()
        whose = f"A call of role {role!r} goes out without the edits of its prompts"
        try:
            changed = rewrite_chat(met, body)
            outcome = met.outcome
        except Exception as error:  # noqa: BLE001 - the application gets its answer all the same
            call.unedited = UNMATCHED
            warn(UNMATCHED, f"{whose}: it could not be read.", error)
            return
        if outcome != "edited":
            call.unedited = outcome
            unread = f"{', '.join(met.ambiguous)} can be read in several ways" if met.ambiguous else met.difference
            warn(outcome, f"{whose}: {unread}.")
        elif changed is not body:
            call.edits, call.rewritten = edits, Outgoing.of(changed)


def as_asked(call: Asked | None, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A further request that is made for a call, with the texts that the call asked in place of those that its edits
    have made of them; `body` itself where it has none of these."""
    if call is None or call.edits is None:
        return body
    edited = call.edits.text
    asked: dict[tuple[Kind, str, str], str] = {}

    def said(kind: Kind, key: str, text: str) -> None:
        if (new := edited(kind, key, text)) is not None:
            asked[kind, key, new] = text

    form = call.params.get("response_format")
    map_body({"messages": call.messages, "tools": call.tools, "response_format": form}, said)
    return map_body(body, lambda kind, key, text: asked.get((kind, key, text)))


def leave_format(call: Asked, warn: Callable[..., None]) -> None:
    """Have the schema of the response go out as it was asked, by a client that has it as a class; counted if that is
    another than it should be."""
    out = call.rewritten
    if out is not None and out.params != call.params:
        call.rewritten = msgspec.structs.replace(out, params=call.params)
        if (out.messages, out.tools) == (call.messages, call.tools):
            _leave(call)
        warn(UNMATCHED, f"A call of role {call.role!r} goes out with the schema that it has: it is given as a class.")


def made_of(call: Asked, read: Callable[[], Mapping[str, Any] | None], warn: Callable[..., None]) -> bool:
    """Whether what a client has made of a call's edits reads as they say. Else the call goes out as it was asked,
    counted: the client has its texts in a form of its own."""
    error: Exception | None = None
    try:
        made, out = Outgoing.of(read() or {}), call.rewritten
        if out is not None and _texts(made) == _texts(out):
            return True
    except Exception as broken:  # noqa: BLE001 - the application gets its answer all the same
        error = broken
    _leave(call)
    whose = f"A call of role {call.role!r} goes out without the edits of its prompts"
    warn(UNMATCHED, f"{whose}: its client has them in a form of its own.", error)
    return False


def _texts(out: Outgoing) -> tuple[Any, ...]:
    return out.messages, out.tools, out.params.get("response_format")


def _leave(call: Asked) -> None:
    call.unedited, call.edits, call.rewritten = UNMATCHED, None, None


Named = Callable[[list[bytes], list[Any]], tuple[str, ...]]
"""Stores bodies, given with their JSON, and gives their content addresses."""


def sent_fields(call: Asked, asked: tuple[str, ...], stored: Outgoing, named: Named) -> dict[str, Any]:
    """The fields of a record that say what went out, as it is `stored`; `asked` are the ids of the call's messages."""
    found: dict[str, Any] = {}
    out = call.rewritten
    assert out is not None
    changed = [i for i, (new, old) in enumerate(zip(out.messages, call.messages, strict=True)) if new is not old]
    if changed:
        bodies = [stored.messages[i] for i in changed]
        names = dict(zip(changed, named(list(map(canonical, bodies)), bodies), strict=True))
        found["sent"] = tuple(names.get(i, name) for i, name in enumerate(asked))
    if stored.tools and any(new is not old for new, old in zip(out.tools or (), call.tools or (), strict=True)):
        (found["sent_tools"],) = named([canonical({"tools": stored.tools})], [stored.tools])
    form = out.params.get("response_format")
    if form is not call.params.get("response_format"):
        body = stored.params.get("response_format")
        (found["sent_format"],) = named([canonical({"response_format": body})], [body])
    return found
