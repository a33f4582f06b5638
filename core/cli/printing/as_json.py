"""`cotune show --json`: the same for programs, one JSON value a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cotune.errors import RecordError
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store


def line(value: Any) -> str:
    """A value on one line; NaN is null."""
    return msgspec.json.encode(value).decode()


def episodes_as_json(store: Store, filters: EpisodeFilters, limit: int) -> Iterator[str]:
    """The latest episodes, the newest last, each with its rewards."""
    ids = store.figures().episode_ids(filters, limit)[::-1]
    rewards, feedback = store.rewards(ids), store.feedback(ids)
    for id in ids:
        given = {"rewards": rewards[id], "feedback": feedback[id]}
        try:
            yield line({**msgspec.to_builtins(store.episode(id)), **given})
        except RecordError:
            yield line({"id": id, "status": "broken row", **given})


def episode_as_json(store: Store, id: str) -> str:
    """An episode with its calls, their messages and candidates. Raises RecordError for an unknown one."""
    id = store.figures().episode_named(id)
    calls = store.calls(id)
    try:
        about = msgspec.to_builtins(store.episode(id))
    except RecordError:
        if not calls:
            raise
        about = {"id": id, "status": "unfinished"}
    given = {"rewards": store.rewards([id])[id], "feedback": store.feedback([id])[id]}
    return line({**about, **given, "calls": [_call(store, call) for call in calls]})


def _call(store: Store, call: CallRecord) -> dict[str, Any]:
    ids = [candidate_id(call.id, c.index) for c in call.candidates]
    rewards, feedback = store.rewards(ids), store.feedback(ids)
    candidates = [
        {
            **msgspec.to_builtins(msgspec.structs.replace(c, token_ids=(), logprobs=(), shown=None)),
            "tokens": len(c.token_ids),
            "rewards": rewards[id],
            "feedback": feedback[id],
        }
        for id, c in zip(ids, call.candidates, strict=True)
    ]
    for candidate in candidates:
        del candidate["token_ids"], candidate["logprobs"], candidate["shown"]
    messages = [_message(store, id) for id in call.messages]
    about = msgspec.to_builtins(msgspec.structs.replace(call, candidates=()))
    sent = [_message(store, id) for id in call.sent]
    return {**about, "messages": messages, "sent": sent, "candidates": candidates}


def _message(store: Store, id: str) -> Any:
    try:
        return store.message(id)
    except RecordError:
        return {"lost": id}
