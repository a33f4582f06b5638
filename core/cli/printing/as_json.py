"""`cotune show --json`: episodes and steps for programs, one JSON value per line."""

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
    """A value as one line of JSON. NaN becomes null."""
    return msgspec.json.encode(value).decode()


def episodes_as_json(store: Store, filters: EpisodeFilters, limit: int) -> Iterator[str]:
    """The latest episodes as lines of JSON, the newest last, each with its rewards."""
    ids = store.figures().episode_ids(filters, limit)[::-1]
    rewards = store.rewards(ids)
    feedback = store.feedback(ids)
    for id in ids:
        try:
            episode = msgspec.to_builtins(store.episode(id))
        except RecordError:
            episode = {"id": id, "status": "broken row"}
        yield line({**episode, "rewards": rewards[id], "feedback": feedback[id]})


def episode_as_json(store: Store, id: str) -> str:
    """An episode with its calls, their messages and candidates, as one line of JSON. Raises RecordError for an unknown
    episode."""
    id = store.figures().episode_named(id)
    calls = store.calls(id)
    try:
        episode = msgspec.to_builtins(store.episode(id))
    except RecordError:
        if not calls:
            raise
        episode = {"id": id, "status": "unfinished"}
    rewards = store.rewards([id])[id]
    feedback = store.feedback([id])[id]
    details = [_call(store, call) for call in calls]
    return line({**episode, "rewards": rewards, "feedback": feedback, "calls": details})


def _call(store: Store, call: CallRecord) -> dict[str, Any]:
    """A call as plain data: its messages instead of their ids, and its candidates with their rewards.

    Token ids and log-probabilities are left out: they are long, and their number (`tokens`) is enough for a reader.
    """
    ids = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
    rewards = store.rewards(ids)
    feedback = store.feedback(ids)
    candidates = []
    for id, candidate in zip(ids, call.candidates, strict=True):
        # Emptied first, so that long lists are not converted only to be deleted.
        fields = msgspec.to_builtins(msgspec.structs.replace(candidate, token_ids=(), logprobs=(), shown=None))
        del fields["token_ids"], fields["logprobs"], fields["shown"]
        fields |= {"tokens": len(candidate.token_ids), "rewards": rewards[id], "feedback": feedback[id]}
        candidates.append(fields)
    messages = [_message(store, id) for id in call.messages]
    sent = [_message(store, id) for id in call.sent]
    fields_of_call = msgspec.to_builtins(msgspec.structs.replace(call, candidates=()))
    return {**fields_of_call, "messages": messages, "sent": sent, "candidates": candidates}


def _message(store: Store, id: str) -> Any:
    try:
        return store.message(id)
    except RecordError:
        return {"lost": id}
