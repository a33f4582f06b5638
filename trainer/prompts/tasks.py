"""The tasks of a search: some to reflect on, some to choose candidates by, and held-out ones, which it never uses."""

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
"""Share of the tasks that chooses between candidates; the search reflects on the others."""
_MORE = "Give more tasks: with few, a better candidate is luck."


class SearchTasks(msgspec.Struct, frozen=True):
    """Tasks to reflect on (`train`), tasks to choose between candidates, held-out tasks, and notes for the user."""

    train: Sequence[Task]
    validation: Sequence[Task]
    held_out: Sequence[Task]
    notes: Sequence[str] = ()


def split_for_search(tasks: Sequence[Task], options: ImproveOptions) -> SearchTasks:
    """Split the tasks by a hash of their ids. Raises ConfigError if there are too few, or if the file of held-out tasks
    cannot be read."""
    ranked = sorted(tasks, key=lambda task: hashlib.sha256(f"{options.seed} {task.id}".encode()).digest())
    notes: list[str] = []
    if options.held_out_tasks:
        held_out = load_tasks(options.held_out_tasks)
        for_search = ranked
        notes += overlap(tasks, held_out)
    else:
        held_out_count = len(ranked) // 3
        held_out = ranked[:held_out_count]
        for_search = ranked[held_out_count:]
        notes.append(f"held out: {plural(held_out_count, 'task')} of {len(tasks)}; --eval-tasks FILE takes others")
    validation_count = max(LEAST, round(VALIDATION * len(for_search)))
    split = SearchTasks(
        train=for_search[validation_count:],
        validation=for_search[:validation_count],
        held_out=held_out,
        notes=notes,
    )
    for name in ("train", "validation", "held_out"):
        count = len(getattr(split, name))
        if count < LEAST:
            fault = f"leaves {plural(count, 'task')} for {name.replace('_', ' ')}, and {LEAST} are needed"
            raise ConfigError("tasks", len(tasks), fault, _MORE)
    return split
