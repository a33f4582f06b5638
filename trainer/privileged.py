"""What a critic sees beyond the policy: text of the task that the application does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError
from cotune.records.structs import Episode, Task
from cotune.sampling.protocol import ChatFormat


def check_privileged(field: str, tasks: Sequence[Task]) -> None:
    """Raises ConfigError where the critic is to see a field that a task lacks."""
    if field:
        for task in tasks:
            _text(task, field)


def with_privileged(
    rows: Sequence[TrainRow], episodes: Sequence[Episode], chat: ChatFormat, field: str
) -> Sequence[TrainRow]:
    """The rows of a policy with the token ids of the field of their task that its critic alone sees."""
    if not field:
        return rows
    seen = {e.id: tuple(chat.render([{"role": "user", "content": _text(e.task, field)}], None)) for e in episodes}
    return [msgspec.structs.replace(row, privileged=seen[row.trajectory]) for row in rows]


def _text(task: Task, field: str) -> str:
    found: Any = task.input.get(field) if isinstance(task.input, Mapping) else None
    if not isinstance(found, str) or not found:
        remedy = "Give every task a text there, or leave critic_sees out."
        raise ConfigError("critic_sees", field, f"is not text in every task; task {task.id} has {found!r}", remedy)
    return found
