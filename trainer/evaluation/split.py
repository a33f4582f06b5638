"""Tasks that a run holds out of training by itself, to evaluate its policies on them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cotune.config.train import NO_TASKS, EvaluationConfig, TrainConfig
from cotune.errors import ConfigError
from cotune.json_values import plain
from cotune.records.structs import Task
from cotune.records.tasks import load_tasks, task_line
from cotune.tables import plural
from cotune.trainer.evaluation.verdict import what_tasks_show
from cotune.trainer.run.run_folder import write_atomically

SHARE = 3
"""One of this many tasks is held out, until `MOST` are."""
LEAST = 16
"""Fewest held-out tasks: they show a gain of about 55 points. A run with fewer, and so with less than 48 tasks, trains
on all of them and says so."""
MOST = 51
"""Most held-out tasks: they show a gain of 30 points of success in 4 of 5 runs (`tasks_for_gain`)."""
FILE = "held_out.jsonl"
"""File of a run folder with the tasks that it holds out by itself."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that a run trains on, and the held-out tasks. `chosen_ids` are the ids of the held-out tasks that the
    run has chosen by itself. `note` describes the split."""

    tasks: Sequence[Task]
    held_out: Sequence[Task] = ()
    chosen_ids: Sequence[str] = ()
    note: str = ""


def split_tasks(tasks: Sequence[Task], config: TrainConfig) -> Split:
    """Split the tasks of a new run. It holds out the tasks of a file, or a third of `tasks` (at most `MOST`), or none.

    The same tasks and seed give the same split. Raises ConfigError if the file is not a tasks file, or if settings need
    held-out tasks and there are too few tasks.
    """
    # A run on records has no tasks to hold out, so it can only have a file.
    if config.from_records or config.evaluation.tasks:
        held_out = _load_held_out(config.evaluation)
        return Split(tasks=tasks, held_out=held_out, note=what_tasks_show(len(held_out)) if held_out else "")
    wanted = min(len(tasks) // SHARE, MOST)
    held_out_ids = _choose(tasks, wanted, config) if wanted >= LEAST else set()
    if len(held_out_ids) < LEAST:  # too few tasks, or too few that differ
        few = f"no task is held out: {plural(len(tasks), 'task')}, and {SHARE * LEAST} different ones are needed"
        if needing := config.evaluation.needing_tasks:
            raise ConfigError(
                f"evaluation.{needing}",
                getattr(config.evaluation, needing),
                f"needs held-out tasks, but {few}",
                _REMEDY,
            )
        return Split(tasks=tasks, note=f"{few}, so the policies' success on new tasks is not measured. {_REMEDY}")
    count = len(held_out_ids)
    note = (
        f"held out: {count} of {plural(len(tasks), 'task')}, never trained on. The policies are tried on them before "
        f"the first step and after the last one; {what_tasks_show(count)} (--eval-tasks FILE takes others, "
        "--eval-tasks none turns it off)"
    )
    return _hold_out(tasks, held_out_ids, note)


def split_again(tasks: Sequence[Task], config: TrainConfig, described: Mapping[str, Any]) -> Split:
    """Split the tasks of a resumed run. Tasks that run.json lists as held out are never trained on, even if the run is
    evaluated on others now. Raises ConfigError."""
    held_out_ids = set((described.get("held") or {}).get("held_out", ()))
    split = _hold_out(tasks, held_out_ids, note="")
    if config.from_records or config.evaluation.tasks:
        return Split(tasks=split.tasks, held_out=_load_held_out(config.evaluation))
    return split


def write_split(folder: Path, split: Split, say: Callable[[str], None]) -> str:
    """Write the tasks that a run holds out by itself. Returns the path of their file; an empty text without any.

    If some of them are not JSON, no file is written, and `say` gets a message.
    """
    if not split.chosen_ids:
        return ""
    file = folder / FILE
    lines: list[bytes] = []
    faults: list[str] = []
    for task in split.held_out:
        try:
            lines.append(task_line(task))
        except (TypeError, ValueError) as error:
            faults.append(f"task {task.id}: {error}")
    if faults:
        say(
            f"{len(faults)} of {plural(len(split.held_out), 'held-out task')} are not JSON ({faults[0]}), so {file} is "
            "not written; cotune eval needs a file of your own"
        )
        return ""
    write_atomically(file, b"".join(lines))
    return str(file)


_REMEDY = "Pass --eval-tasks FILE with tasks of your own, or more --tasks."


def _load_held_out(config: EvaluationConfig) -> list[Task]:
    """Load the held-out tasks of the file in `evaluation.tasks`; none without a file."""
    if config.tasks in ("", NO_TASKS):
        return []
    try:
        return load_tasks(config.tasks)
    except ConfigError as error:
        raise ConfigError("evaluation.tasks", error.value, error.fault, error.remedy) from None


def _hold_out(tasks: Sequence[Task], held_out_ids: set[str], note: str) -> Split:
    """Divide the tasks into held-out ones, whose ids are in `held_out_ids`, and tasks to train on."""
    held_out = [task for task in tasks if task.id in held_out_ids]
    return Split(
        tasks=[task for task in tasks if task.id not in held_out_ids],
        held_out=held_out,
        chosen_ids=[task.id for task in held_out],
        note=note,
    )


def _choose(tasks: Sequence[Task], wanted: int, config: TrainConfig) -> set[str]:
    """Choose the ids of about `wanted` tasks to hold out, by a hash of seed and id, so that the same tasks are chosen
    again.

    Tasks with the same input stay together, so that no held-out task is trained on, and each level of a curriculum has
    tasks left.
    """
    # 1. Groups of tasks with the same input, in a random order that depends only on the seed and on the ids.
    tasks_of_input: dict[bytes, list[Task]] = {}
    for task in tasks:
        tasks_of_input.setdefault(_content(task), []).append(task)

    def hash_of_group(same_input: Sequence[Task]) -> bytes:
        """The hash of the seed and of the first task's id, which decides the place in the order."""
        return hashlib.blake2b(f"{config.seed} {same_input[0].id}".encode(), digest_size=16).digest()

    # 2. Hold out one group after the other, as long as it fits and leaves tasks to train on in each of its levels.
    tasks_left_of_level = Counter(_level(task, config.curriculum.by) for task in tasks)
    held_out_ids: set[str] = set()
    for same_input in sorted(tasks_of_input.values(), key=hash_of_group):
        tasks_of_level = Counter(_level(task, config.curriculum.by) for task in same_input)
        fits = len(held_out_ids) + len(same_input) <= wanted
        would_empty_a_level = any(tasks_left_of_level[level] <= count for level, count in tasks_of_level.items())
        if fits and not would_empty_a_level:
            held_out_ids.update(task.id for task in same_input)
            tasks_left_of_level -= tasks_of_level
    return held_out_ids


def _level(task: Task, by: str) -> Any:
    return task.input.get(by) if by and isinstance(task.input, Mapping) else None


def _content(task: Task) -> bytes:
    """Encode the input of a task without its id."""
    content = task.input
    if isinstance(content, Mapping):
        content = {name: value for name, value in content.items() if name != "id"}
    return msgspec.json.encode(content, enc_hook=plain)


def overlap(tasks: Sequence[Task], held_out: Sequence[Task]) -> Iterator[str]:
    """Yield a warning if some of the held-out tasks are trained on."""
    trained_on = {_content(task) for task in tasks}
    count = sum(_content(task) in trained_on for task in held_out)
    if count:
        yield f"{count} of {len(held_out)} held-out tasks are trained on too: success on them says little"
