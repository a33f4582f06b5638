"""Names of sets of tasks. Figures on different sets cannot be compared, so each figure names its set."""

from __future__ import annotations

from pathlib import Path

from cotune.reading.evaluations import IN_TRAINING, StoredEvaluation

_NONE = "none"
"""The value of `evaluation.tasks` with which no tasks are held out."""


def held_out_set(file: object, tasks: object) -> str:
    """The name of a run's held-out tasks: their own `file`, or else the file of `tasks` that they were taken from.

    Empty if neither is known."""
    if isinstance(file, str) and file not in ("", _NONE):
        return _name(file)
    return f"tasks held out of {_name(tasks)}" if isinstance(tasks, str) and tasks else ""


def evaluated_set(evaluation: StoredEvaluation, held_out: str) -> str:
    """The name of an evaluation's tasks, or empty. `held_out` names the tasks that training evaluates on."""
    if evaluation.tasks:
        return _name(evaluation.tasks)
    return held_out if evaluation.name.startswith(IN_TRAINING) else ""


def _name(file: str) -> str:
    return Path(file).name or file
