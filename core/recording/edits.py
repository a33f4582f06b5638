"""Edit the request of a call: replace the application's prompts with the edited prompts of its role.

The application's own request is not changed and is recorded too. The request that is sent is a second one, which shares
all unchanged parts with it. If a call does not have the texts that the prompts edit, the application's request is sent,
and the call is counted.
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
    """The part of a chat request that prompts may change, as it is sent."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    params: dict[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Outgoing:
        """This part of a chat request in OpenAI form."""
        params = {name: value for name, value in body.items() if name not in ("messages", "tools", "model", "stream")}
        return cls(list(body.get("messages") or ()), body.get("tools") or None, params)


class Asked(Protocol):
    """The fields of a call that edits read and set."""

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
        """The edits of a role; None without any."""
        if role not in self._roles:
            self._roles[role] = self._prompts.edits(role)
        return self._roles[role]

    def edit(self, call: Asked, body: Mapping[str, Any], warn: Callable[..., None], role: str = "") -> None:
        """Set `call.rewritten`, the request to send, to `body`, the application's request, with edited prompts.

        If the texts of `body` do not match the prompts, the call is sent unedited, and `warn` counts it. `role` is the
        name of the call's role in the prompts, if it differs from `call.role`.
        """
        role_in_prompts = role or call.role
        edits = self.of(role_in_prompts)
        if edits is None:
            return
        call.prompts = self.id
        matching = edits.begin()
        warning = f"A call of role {role_in_prompts!r} goes out without the edits of its prompts"
        try:
            changed = rewrite_chat(matching, body)
            outcome = matching.outcome
        except Exception as error:  # noqa: BLE001 - the application must still get its answer
            call.unedited = UNMATCHED
            warn(UNMATCHED, f"{warning}: it could not be read.", error)
            return
        if outcome != "edited":
            call.unedited = outcome
            reason = matching.difference
            if matching.ambiguous:
                reason = f"{', '.join(matching.ambiguous)} can be read in several ways"
            warn(outcome, f"{warning}: {reason}.")
        elif changed is not body:
            call.edits = edits
            call.rewritten = Outgoing.of(changed)


def undo_edits(call: Asked | None, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace edited texts with the application's own texts in `body`, a second request that a client makes for a call
    whose first request was edited. Returns `body` itself if it has no edited text."""
    if call is None or call.edits is None:
        return body
    # `map_body` calls a function with each text of a request. Here it only collects the texts that edits replace.
    edit_text = call.edits.text
    original_of: dict[tuple[Kind, str, str], str] = {}

    def note_edit(kind: Kind, key: str, text: str) -> None:
        edited_text = edit_text(kind, key, text)
        if edited_text is not None:
            original_of[kind, key, edited_text] = text

    form = call.params.get("response_format")
    map_body({"messages": call.messages, "tools": call.tools, "response_format": form}, note_edit)
    return map_body(body, lambda kind, key, text: original_of.get((kind, key, text)))


def keep_own_format(call: Asked, warn: Callable[..., None]) -> None:
    """Send the application's own schema of the response (`response_format`), because its client has the schema as a
    class, which cannot be edited. If edits have changed the schema, the call is counted."""
    out = call.rewritten
    if out is None or out.params == call.params:
        return
    call.rewritten = msgspec.structs.replace(out, params=call.params)
    if out.messages == call.messages and out.tools == call.tools:  # the schema was all that edits changed
        _leave_unedited(call)
    warn(
        UNMATCHED,
        f"A call of role {call.role!r} goes out with its own schema of the response, because it is given as a class.",
    )


def check_edits_sent(call: Asked, read: Callable[[], Mapping[str, Any] | None], warn: Callable[..., None]) -> bool:
    """Check that the request that a client is about to send has the edited texts of a call. Returns whether it has.
    `read` returns the request.

    A client may hold texts in a form that cotune cannot edit, and so send the application's own texts. The call is then
    marked as sent unedited, and counted.
    """
    error: Exception | None = None
    try:
        request = Outgoing.of(read() or {})
        edited = call.rewritten
        if edited is not None and _texts_of_request(request) == _texts_of_request(edited):
            return True
    except Exception as broken:  # noqa: BLE001 - the application must still get its answer
        error = broken
    _leave_unedited(call)
    warning = f"A call of role {call.role!r} goes out without the edits of its prompts"
    warn(UNMATCHED, f"{warning}: its client has them in a form of its own.", error)
    return False


def _texts_of_request(out: Outgoing) -> tuple[Any, ...]:
    return out.messages, out.tools, out.params.get("response_format")


def _leave_unedited(call: Asked) -> None:
    call.unedited = UNMATCHED
    call.edits = None
    call.rewritten = None


StoreBodies = Callable[[list[bytes], list[Any]], tuple[str, ...]]
"""Stores bodies, which are passed with their JSON, and returns their content addresses."""


def sent_fields(
    call: Asked, message_ids: tuple[str, ...], redacted: Outgoing, store_bodies: StoreBodies
) -> dict[str, Any]:
    """The fields of a call's record for the edited request that was sent (`call.rewritten`). They are `sent` (ids of
    messages), `sent_tools` and `sent_format` (the schema of the answer), each only if edits changed this part.

    `message_ids` are the ids of the application's own messages. `redacted` is the edited request in the form in which
    it may be stored.
    """
    fields: dict[str, Any] = {}
    edited = call.rewritten
    assert edited is not None

    # Edits replace a message or a tool with another object. The objects of unchanged ones are the application's.
    changed_indices: list[int] = []
    for i, (edited_message, message) in enumerate(zip(edited.messages, call.messages, strict=True)):
        if edited_message is not message:
            changed_indices.append(i)
    if changed_indices:
        sent_ids = list(message_ids)
        bodies = [redacted.messages[i] for i in changed_indices]
        edited_ids = store_bodies(list(map(canonical, bodies)), bodies)
        for i, edited_id in zip(changed_indices, edited_ids, strict=True):
            sent_ids[i] = edited_id
        fields["sent"] = tuple(sent_ids)

    if redacted.tools:
        tool_pairs = zip(edited.tools or (), call.tools or (), strict=True)
        if any(edited_tool is not tool for edited_tool, tool in tool_pairs):
            (fields["sent_tools"],) = store_bodies([canonical({"tools": redacted.tools})], [redacted.tools])

    if edited.params.get("response_format") is not call.params.get("response_format"):
        schema = redacted.params.get("response_format")
        (fields["sent_format"],) = store_bodies([canonical({"response_format": schema})], [schema])
    return fields
