"""Which parts of edited prompts recorded calls have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cotune.prompts.chat_texts import Kind, map_body
from cotune.prompts.edits import PromptPart, Prompts
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store


@dataclass
class PartUse:
    """An edited part, the calls of its roles, and those that have its old text."""

    part: PromptPart
    calls: int = 0
    matched: int = 0
    reach: int = 0
    """Characters after which the nearest text of the others differs from it."""


@dataclass
class Uses:
    """The use of each edited part, and the calls by role that would go out without the edits of their role."""

    parts: list[PartUse]
    unedited: dict[str, int]


def read_uses(store: Store, calls: Iterable[CallRecord], prompts: Prompts) -> Uses:
    """What these calls asked, against the edited parts. Raises RecordError for a lost message."""
    found = Uses([PartUse(part) for part in prompts.parts if part.edited], {})
    for call in calls:
        edits = prompts.edits(call.role)
        if edits is None:
            continue
        texts = list(_texts(store, call))
        met = edits.begin()
        for kind, key, text in texts:
            met.text(kind, key, text)
        if met.outcome != "edited":
            found.unedited[call.role] = found.unedited.get(call.role, 0) + 1
        for use in found.parts:
            if call.role not in use.part.roles:
                continue
            use.calls += 1
            own = [text for kind, key, text in texts if (kind, key) == (use.part.kind, use.part.key)]
            use.matched += any(use.part.old.match(text) is not None for text in own)
            use.reach = max([use.reach, *(use.part.old.reach(text) for text in own)])
    return found


def _texts(store: Store, call: CallRecord) -> Iterator[tuple[Kind, str, str]]:
    seen: list[tuple[Kind, str, str]] = []
    body = {
        "messages": [store.message(id) for id in call.messages],
        "tools": store.message(call.tools) if call.tools else None,
        "response_format": call.params.get("response_format"),
    }
    map_body(body, lambda kind, key, text: seen.append((kind, key, text)))
    yield from seen
