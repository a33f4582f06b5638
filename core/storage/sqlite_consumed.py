"""The ledger of trained groups, read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class ConsumedGroups(Mapping[str, int]):
    """Group id -> training step that consumed it. A lookup is one query by key, so that a step of a long run does not
    read the groups of all steps before it."""

    def __init__(self, rows: Callable[[str, Sequence[Any]], list[Any]]) -> None:
        self._rows = rows

    def __getitem__(self, group: str) -> int:
        for (step,) in self._rows("SELECT training_step FROM consumed WHERE is_group AND target = ?", [group]):
            return int(step)
        raise KeyError(group)

    def __iter__(self) -> Iterator[str]:
        return (group for (group,) in self._rows("SELECT target FROM consumed WHERE is_group", []))

    def __len__(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM consumed WHERE is_group", [])[0][0])
