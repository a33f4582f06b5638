"""Recorded answers as lines for supervised fine-tuning: the prompt's messages with the chosen answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from cotune.reading.recorded_answers import recorded_answers
from cotune.storage.protocol import Store
from cotune.storage.whole_file import whole_file


class ExportCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of lines written, and of calls that were left out, by reason."""

    lines: int
    left_out: dict[str, int]


def write_supervised(
    store: Store,
    path: str | Path,
    *,
    role: str | None = None,
    min_reward: float | None = None,
    asked: bool = False,
) -> ExportCounts:
    """Write recorded answers as a data set for supervised fine-tuning: a JSON line with `messages` and `tools` for
    each.

    See `recorded_answers` for the choice of answers. An answer that cannot be used is counted by its fault.
    """
    left_out: Counter[str] = Counter()
    lines = 0
    with whole_file(path) as file:
        episodes = store.episodes()
        for recorded in recorded_answers(store, episodes, left_out, role=role, min_reward=min_reward, asked=asked):
            if recorded.fault is not None:
                left_out[recorded.fault] += 1
                continue
            line: dict[str, Any] = {"messages": [*recorded.messages, recorded.answer]}
            if recorded.tools:
                line["tools"] = recorded.tools
            file.write(msgspec.json.encode(line) + b"\n")
            lines += 1
    return ExportCounts(lines=lines, left_out=dict(left_out))
