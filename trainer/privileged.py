"""What a critic sees beyond the policy: text of the task that the application does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError
from cotune.records.structs import Episode, Task
from cotune.sampling.protocol import ChatFormats

Rows = Mapping[str, Sequence[TrainRow]]


def check_privileged(field: str, tasks: Sequence[Task]) -> None:
    """Raises ConfigError where the critic is to see a field that a task lacks."""
    if field:
        for task in tasks:
            _text(task, field)


def with_privileged(rows: Rows, episodes: Sequence[Episode], chats: ChatFormats, field: str) -> Rows:
    """The rows of a step, by policy, with the token ids of the field of their task that the critic alone sees."""
    if not field:
        return rows
    texts = {e.id: _text(e.task, field) for e in episodes}

    def seen(policy: str, row: TrainRow) -> tuple[int, ...]:  # a template keeps what it has rendered before
        return tuple(chats.of(policy).render([{"role": "user", "content": texts[row.trajectory]}], None))

    return {
        policy: [msgspec.structs.replace(row, privileged=seen(policy, row)) for row in own]
        for policy, own in rows.items()
    }


def _text(task: Task, field: str) -> str:
    found: Any = task.input.get(field) if isinstance(task.input, Mapping) else None
    if not isinstance(found, str) or not found:
        remedy = "Give every task a text there, or leave critic_sees out."
        raise ConfigError("critic_sees", field, f"is not text in every task; task {task.id} has {found!r}", remedy)
    return found
