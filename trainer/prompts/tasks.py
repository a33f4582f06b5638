"""The tasks of a search: some to reflect on, some to choose by, and some that it never sees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from cotune.errors import ConfigError
from cotune.records.structs import Task
from cotune.records.tasks import load_tasks
from cotune.tables import plural
from cotune.trainer.evaluation.split import overlap
from cotune.trainer.prompts.options import ImproveOptions

LEAST = 2
"""Tasks of each kind."""
VALIDATION = 0.4
"""Share of the tasks that chooses between candidates; the others are reflected on."""
_MORE = "Give more tasks: with few, what is found is luck."


class SearchTasks(msgspec.Struct, frozen=True):
    """Tasks to reflect on, to choose between candidates by, and held out; and what is to be said of them."""

    train: Sequence[Task]
    validation: Sequence[Task]
    held_out: Sequence[Task]
    notes: Sequence[str] = ()


def split_for_search(tasks: Sequence[Task], options: ImproveOptions) -> SearchTasks:
    """The split, by a hash of the tasks' ids. Raises ConfigError where there are too few, and for a file of held-out
    tasks that is none."""
    ranked = sorted(tasks, key=lambda task: hashlib.sha256(f"{options.seed} {task.id}".encode()).digest())
    notes: list[str] = []
    if options.eval_tasks is not None:
        held_out, rest = load_tasks(options.eval_tasks), ranked
        notes += overlap(tasks, held_out)
    else:
        third = len(ranked) // 3
        held_out, rest = ranked[:third], ranked[third:]
        notes.append(f"held out: {plural(third, 'task')} of {len(tasks)}; --eval-tasks FILE takes others")
    validation = max(LEAST, round(VALIDATION * len(rest)))
    found = SearchTasks(rest[validation:], rest[:validation], held_out, notes)
    for name in ("train", "validation", "held_out"):
        if len(getattr(found, name)) < LEAST:
            fault = f"leaves {plural(len(getattr(found, name)), 'task')} for {name.replace('_', ' ')}"
            raise ConfigError("tasks", len(tasks), f"{fault}, of which {LEAST} are needed", _MORE)
    return found
