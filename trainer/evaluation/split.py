"""Tasks that a run holds out of training by itself, to evaluate its policies on them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""One task of so many is held out, until there are `MOST`."""
LEAST = 16
"""Held-out tasks that a run needs: they show a gain of about 55 points. With fewer, and so below 48 tasks, a run trains
on all and says so."""
MOST = 51
"""Held-out tasks at most: they show a gain of 30 points of success in 4 of 5 runs (`tasks_for_gain`)."""
FILE = "held_out.jsonl"
"""File of a run folder with the tasks that it holds out by itself."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that a run trains on, and those that it tries its policies on. `own` are the ids of these where the run
    has chosen them by itself. `note` describes the split."""

    tasks: Sequence[Task]
    held_out: Sequence[Task] = ()
    own: Sequence[str] = ()
    note: str = ""


def split_tasks(tasks: Sequence[Task], config: TrainConfig) -> Split:
    """The split of a new run: held out are the tasks of a file, or a third of `tasks`, at most `MOST`, or none.

    The same tasks and seed give the same split. Raises ConfigError for a file that is no tasks file, and where settings
    need held-out tasks.
    """
    if config.from_records or config.evaluation.tasks:
        held_out = _of_file(config.evaluation, tasks)
        return Split(tasks=tasks, held_out=held_out, note=what_tasks_show(len(held_out)) if held_out else "")
    wanted = min(len(tasks) // SHARE, MOST)
    own = _chosen(tasks, wanted, config) if wanted >= LEAST else set()
    if len(own) < LEAST:
        few = f"no task is held out: {plural(len(tasks), 'task')}, and {SHARE * LEAST} different ones are needed"
        if needing := config.evaluation.needing_tasks:
            raise ConfigError(
                f"evaluation.{needing}",
                getattr(config.evaluation, needing),
                f"needs held-out tasks, but {few}",
                _REMEDY,
            )
        return Split(tasks=tasks, note=f"{few}, so what the policies reach is not known. {_REMEDY}")
    return _parted(
        tasks,
        own,
        f"held out: {len(own)} of {plural(len(tasks), 'task')}, never trained on. The policies are tried on them "
        f"before the first step and after the last one; {what_tasks_show(len(own))} (--eval-tasks FILE takes others, "
        "--eval-tasks none turns it off)",
    )


def split_again(tasks: Sequence[Task], config: TrainConfig, described: Mapping[str, Any]) -> Split:
    """The split of a resumed run: tasks that run.json lists as held out are not trained on, whatever the run is
    evaluated on now. Raises ConfigError."""
    own = set((described.get("held") or {}).get("held_out", ()))
    split = _parted(tasks, own, "")
    if config.from_records or config.evaluation.tasks:
        return Split(tasks=split.tasks, held_out=_of_file(config.evaluation, split.tasks))
    return split


def write_split(folder: Path, split: Split, say: Callable[[str], None]) -> str:
    """Write the tasks that a run holds out by itself; returns the path of their file, empty without any. Where some are
    not JSON, there is no file, and `say` is told."""
    if not split.own:
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


def _of_file(config: EvaluationConfig, tasks: Sequence[Task]) -> list[Task]:
    if config.tasks in ("", NO_TASKS):
        return []
    try:
        return load_tasks(config.tasks)
    except ConfigError as error:
        raise ConfigError("evaluation.tasks", error.value, error.fault, error.remedy) from None


def _parted(tasks: Sequence[Task], own: Iterable[str], note: str) -> Split:
    own = set(own)
    held_out = [task for task in tasks if task.id in own]
    return Split(
        tasks=[task for task in tasks if task.id not in own],
        held_out=held_out,
        own=[task.id for task in held_out],
        note=note,
    )


def _chosen(tasks: Sequence[Task], wanted: int, config: TrainConfig) -> set[str]:
    """Ids by the hash of seed and id; tasks with one input stay together, and no level of a curriculum is emptied."""
    alike: dict[bytes, list[Task]] = {}
    for task in tasks:
        alike.setdefault(_content(task), []).append(task)

    def rank(same: Sequence[Task]) -> bytes:
        return hashlib.blake2b(f"{config.seed} {same[0].id}".encode(), digest_size=16).digest()

    ranked = sorted(alike.values(), key=rank)
    left = Counter(_level(task, config.curriculum.by) for task in tasks)
    chosen: set[str] = set()
    for same in ranked:
        levels = Counter(_level(task, config.curriculum.by) for task in same)
        if len(chosen) + len(same) <= wanted and all(left[level] > count for level, count in levels.items()):
            chosen.update(task.id for task in same)
            left -= levels
    return chosen


def _level(task: Task, by: str) -> Any:
    return task.input.get(by) if by and isinstance(task.input, Mapping) else None


def _content(task: Task) -> bytes:
    """The input of a task without its id."""
    given = task.input
    if isinstance(given, Mapping):
        given = {name: value for name, value in given.items() if name != "id"}
    return msgspec.json.encode(given, enc_hook=plain)


def overlap(tasks: Sequence[Task], held_out: Sequence[Task]) -> Iterator[str]:
    """A sentence where tasks are not held out at all."""
    known = {_content(task) for task in tasks}
    count = sum(_content(task) in known for task in held_out)
    if count:
        yield f"{count} of {len(held_out)} held-out tasks are trained on too: success on them says little"
