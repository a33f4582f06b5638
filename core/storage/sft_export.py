"""Recorded answers as lines for supervised fine-tuning: the prompt's messages with the answer that went on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import RecordError
from cotune.recording.records import Call, Episode, candidate_id
from cotune.storage.protocol import Store


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Lines written, and the calls that were left out by reason."""

    lines: int
    left_out: dict[str, int]


def write_supervised(
    store: Store, path: str | Path, *, role: str | None = None, min_reward: float | None = None
) -> Written:
    """Write `{"messages": [...], "tools": [...]}`, one line per call that ended well in an episode that did.

    `role` takes its calls only. `min_reward` is compared with the sum of the answer's own rewards, or with that of the
    episode where the answer has none.
    """
    left_out: Counter[str] = Counter()
    lines = 0
    with Path(path).open("wb") as file:
        for line in supervised(store, left_out, role=role, min_reward=min_reward):
            file.write(msgspec.json.encode(line) + b"\n")
            lines += 1
    return Written(lines=lines, left_out=dict(left_out))


def supervised(
    store: Store, left_out: Counter[str], *, role: str | None = None, min_reward: float | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of `write_supervised`, one by one."""
    for episode in store.episodes():
        for call in store.calls(episode.id):
            reason = _reason(store, episode, call, role, min_reward)
            line = None if reason else _line(store, call)
            if line is None:
                left_out[reason or "lost_message"] += 1
            else:
                yield line
    if store.unreadable:
        left_out["unreadable"] += store.unreadable


def _reason(store: Store, episode: Episode, call: Call, role: str | None, min_reward: float | None) -> str | None:
    if role is not None and call.role != role:
        return "other_role"
    if episode.status != "ok":
        return "failed_episode"
    if call.status != "ok" or call.chosen is None or not call.candidates:
        return "failed_call" if call.status != "ok" else "no_answer"
    if not call.messages:
        return "no_messages"
    if min_reward is None:
        return None
    own = candidate_id(call.id, call.chosen)
    found = store.rewards([own, episode.id])
    rewards = found.get(own) or found.get(episode.id)
    if not rewards:
        return "no_reward"
    return None if sum(rewards.values()) >= min_reward else "below_reward"


def _line(store: Store, call: Call) -> dict[str, Any] | None:
    assert call.chosen is not None
    try:
        messages = [store.message(id) for id in call.messages]
        tools = store.message(call.tools) if call.tools else None
    except RecordError:
        return None
    line = {"messages": [*messages, call.candidates[call.chosen].message]}
    return {**line, "tools": tools} if tools else line
