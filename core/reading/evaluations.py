"""Evaluations of a run as they are stored: those of `cotune eval`, and those that training makes of its held-out tasks.

RUN/eval/evaluation.json, RUN/eval-2/evaluation.json, ...   `cotune eval`, with records.db beside each
RUN/held_out/step-000010.json                               training; its episodes are in RUN/records.db
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cotune.errors import ConfigError
from cotune.intervals import Interval

log = logging.getLogger("cotune")

EVALUATION = "evaluation.json"
"""The file of one evaluation in its folder."""
FOLDER = "eval"
"""The folder of a run for its first evaluation; later ones get a number."""
HELD_OUT = "held_out"
"""The folder of a run for the evaluations that training makes."""
IN_TRAINING = "in training"
"""How the name of an evaluation begins that training has made."""


class TaskEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How the first episode of a task ended in one mode, after how many seconds.

    `reward` is the one that is trained on, `outcome` the sum of the outcome's components; None where it has none that
    is known. A `floored` one failed without an outcome of its own and counts the lowest of the evaluation. One that is
    not `known` says nothing of the policies, as it was cancelled or an outage, and counts in no figure.
    """

    status: str
    reward: float | None = None
    success: bool | None = None
    error: str | None = None
    seconds: float = 0.0
    known: bool = True
    floored: bool = False
    outcome: float | None = None

    @property
    def solved(self) -> bool | None:
        """Whether it solved its task, where others report `success`: not if it failed, or reports none. None where
        nobody knows what came of it."""
        if self.status != "ok":
            return False if self.known else None
        return self.success is True if self.success is not None or self.outcome is not None else None


class ModeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the episodes of a mode took; `cost` where prices were known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    unpriced: int = 0


class EvaluatedMode(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one mode: base, trained, greedy, swapped, ...

    `reward` is the one that is trained on, `outcome` the plain sum of the outcome where that is another. The count of
    an interval is its own: `reward.n` may be below `episodes`. `failed` counts episodes by cause.
    """

    episodes: int
    success: Interval | None = None
    reward: Interval | None = None
    outcome: Interval | None = None
    failed: dict[str, int] = {}
    floor: float = 0.0
    """The reward of a failed episode where it is the lowest."""
    endings: dict[str, TaskEnding] = {}
    """By task id; empty in files that do not have them."""
    use: ModeUse = ModeUse()

    @property
    def failures(self) -> int:
        """How many episodes failed."""
        return sum(self.failed.values())


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One mode minus another over the tasks of both, and what that shows, in a sentence."""

    label: str = ""
    against: str = ""
    success: Interval | None = None
    reward: Interval | None = None
    outcome: Interval | None = None
    verdict: str = ""


class StoredEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation that was written. `evaluations` are by mode; `steps` are those of the weights that it tried."""

    evaluations: dict[str, EvaluatedMode]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    steps: int | None = None
    created: float = 0.0
    """Unix time; that of the file where it does not say."""
    tasks: str = ""
    """The file of its tasks, where there was one."""
    name: str = ""
    """What it is called on screens: its folder's name, or `in training, after step 40`."""
    records: str = ""
    """Path of the folder that has its episodes; empty where they were not kept."""

    def comparison(self, label: str, against: str) -> Comparison | None:
        """The comparison of two modes, if it was made."""
        return next((c for c in self.comparisons if (c.label, c.against) == (label, against)), None)


def claim_folder(run: Path) -> Path:
    """Make the folder of the run's next evaluation: RUN/eval, or the first of RUN/eval-2, ... that is free. Raises
    OSError where none can be made."""
    for number in itertools.count(1):
        folder = run / (FOLDER if number == 1 else f"{FOLDER}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def step_file(run: Path, steps: int) -> Path:
    """The file of training's evaluation after so many steps."""
    return run / HELD_OUT / f"step-{steps:06d}.json"


def read_evaluation(folder: Path) -> StoredEvaluation:
    """The evaluation in a folder. Raises ConfigError where none can be read."""
    try:
        return _read(folder / EVALUATION, folder.name, folder)
    except (OSError, ValueError, RecursionError) as error:
        fault = f"must be a folder that `cotune eval --out` wrote ({error})"
        raise ConfigError("evaluation", str(folder), fault, "Evaluate the run with --out FOLDER.") from None


def read_evaluations(run: Path) -> list[StoredEvaluation]:
    """All evaluations of a run, the oldest first: those of `cotune eval` in folders of the run (or in `run` itself),
    and those of its training. One that cannot be read is left out with a warning."""
    found = [found for file in evaluation_files(run) if (found := _if_readable(file)) is not None]
    return sorted(found, key=lambda one: (one.created, one.steps or 0))


def evaluation_files(run: Path) -> Iterator[Path]:
    """The files of a run's evaluations."""
    if (own := run / EVALUATION).is_file():
        yield own
    yield from sorted(run.glob(f"*/{EVALUATION}"))
    yield from sorted((run / HELD_OUT).glob("step-*.json"))


def in_training(run: Path, steps: int | None = None) -> list[StoredEvaluation]:
    """The evaluations that training made, by their steps; up to `steps`, where that is given."""
    made = [found for file in sorted((run / HELD_OUT).glob("step-*.json")) if (found := _if_readable(file)) is not None]
    return [found for found in made if steps is None or (found.steps or 0) <= steps]


def drop_after(run: Path, steps: int) -> None:
    """Remove training's evaluations of steps after `steps`: they are made again."""
    for file in (run / HELD_OUT).glob("step-*.json"):
        if int(file.stem.rpartition("-")[2]) > steps:
            file.unlink()


def _if_readable(file: Path) -> StoredEvaluation | None:
    try:
        if file.name == EVALUATION:
            return _read(file, file.parent.name, file.parent)
        steps = int(file.stem.rpartition("-")[2])
        when = f"after step {steps}" if steps else "before the first step"
        return _read(file, f"{IN_TRAINING}, {when}", file.parent.parent)
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is left out: it cannot be read: %s", file, error)
        return None


def _read(file: Path, name: str, records: Path) -> StoredEvaluation:
    found = msgspec.convert(json.loads(file.read_bytes()), StoredEvaluation)  # which takes NaN, as a figure may be
    kept = str(records) if (records / "records.db").is_file() else ""
    created = found.created or file.stat().st_mtime
    return msgspec.structs.replace(found, name=name, records=kept, created=created)
