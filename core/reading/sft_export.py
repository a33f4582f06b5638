"""Recorded answers as lines for supervised fine-tuning: the prompt's messages with the chosen answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from cotune.reading.recorded_answers import recorded_answers
from cotune.storage.protocol import Store
from cotune.storage.whole_file import whole_file


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Lines written, and the calls that were left out by reason."""

    lines: int
    left_out: dict[str, int]


def write_supervised(
    store: Store,
    path: str | Path,
    *,
    role: str | None = None,
    min_reward: float | None = None,
    asked: bool = False,
) -> Written:
    """Write `{"messages": [...], "tools": [...]}`, one line per answer of `recorded_answers` that has no fault."""
    left_out: Counter[str] = Counter()
    lines = 0
    with whole_file(path) as file:
        episodes = store.episodes()
        for found in recorded_answers(store, episodes, left_out, role=role, min_reward=min_reward, asked=asked):
            if found.fault is not None:
                left_out[found.fault] += 1
                continue
            line = {"messages": [*found.messages, found.answer]}
            file.write(msgspec.json.encode({**line, "tools": found.tools} if found.tools else line) + b"\n")
            lines += 1
    return Written(lines=lines, left_out=dict(left_out))
