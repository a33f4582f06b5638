"""Find out which parts of edited prompts occur in recorded calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cotune.prompts.chat_texts import Kind, map_body
from cotune.prompts.edits import PromptPart, Prompts
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store


@dataclass
class PartUse:
    """An edited part, the number of calls of its roles, and of calls with its old text (`matched`)."""

    part: PromptPart
    calls: int = 0
    matched: int = 0
    reach: int = 0
    """Number of characters before the first difference, for the most similar text of the other calls."""


@dataclass
class Uses:
    """The use of each edited part, and the number of calls of each role that would be sent unedited."""

    parts: list[PartUse]
    unedited: dict[str, int]


def read_uses(store: Store, calls: Iterable[CallRecord], prompts: Prompts) -> Uses:
    """Count the calls that each edited part of the prompts matches, and the unedited calls of each role.

    Raises RecordError for a lost message.
    """
    uses = Uses([PartUse(part) for part in prompts.parts if part.edited], {})
    for call in calls:
        edits = prompts.edits(call.role)
        if edits is None:
            continue
        texts = list(_texts(store, call))
        # Edit the texts of the call as for a real request. Only the outcome counts here.
        call_edits = edits.begin()
        for kind, key, text in texts:
            call_edits.text(kind, key, text)
        if call_edits.outcome != "edited":
            uses.unedited[call.role] = uses.unedited.get(call.role, 0) + 1
        for use in uses.parts:
            part = use.part
            if call.role not in part.roles:
                continue
            use.calls += 1
            has_match = False
            for kind, key, text in texts:
                if kind == part.kind and key == part.key:
                    has_match = has_match or part.old.match(text) is not None
                    use.reach = max(use.reach, part.old.reach(text))
            if has_match:
                use.matched += 1
    return uses


def _texts(store: Store, call: CallRecord) -> Iterator[tuple[Kind, str, str]]:
    """The texts of a call with their kind and key, collected by visiting the request."""
    seen: list[tuple[Kind, str, str]] = []
    body = {
        "messages": [store.message(id) for id in call.messages],
        "tools": store.message(call.tools) if call.tools else None,
        "response_format": call.params.get("response_format"),
    }
    map_body(body, lambda kind, key, text: seen.append((kind, key, text)))
    yield from seen
