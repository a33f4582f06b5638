"""Evaluations of a run as they are stored: those of `cotune eval`, and those that training makes of its held-out tasks.

RUN/eval/evaluation.json, RUN/eval-2/evaluation.json, ...   `cotune eval`, with records.db beside each
RUN/held_out/step-000010.json                               training; its episodes are in RUN/records.db
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from cotune.errors import ConfigError, WorkflowError
from cotune.intervals import Interval
from cotune.storage.run_layout import RECORDS

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
    """How an episode of a task ended in one mode, after how many seconds.

    `reward` is the one that is trained on, `by_role` that of each role, `outcome` the sum of the outcome's components;
    None where it has none that is known. A `floored` one failed without an outcome of its own and counts the lowest
    reward of the evaluation, an `outcome_floored` one the lowest outcome. One that is not `known` says nothing of the
    policies, as it was cancelled or an outage, and counts in no figure.
    """

    status: str
    reward: float | None = None
    success: bool | None = None
    error: str | None = None
    seconds: float = 0.0
    known: bool = True
    floored: bool = False
    outcome: float | None = None
    by_role: dict[str, float] = {}
    outcome_floored: bool = False
    calls: int | None = None
    """The number of its calls; None in files that do not have it."""

    @property
    def solved(self) -> bool | None:
        """Whether it solved its task, where others report `success`: not if it failed, or reports none. None where
        nobody knows what came of it."""
        if self.status != "ok":
            return False if self.known else None
        return self.success is True if self.success is not None or self.outcome is not None else None


class ModeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the episodes of a mode took. `seconds` is the mean of an episode, `uncounted` counts calls whose provider
    reported no tokens. `cost` is what calls with a price came to, None without any; `unpriced` counts the others."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    seconds: Interval | None = None
    cost: float | None = None
    unpriced: int = 0


class RoleStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one role did. Means are per answered call; `turns` is per episode in which the role took part."""

    calls: int
    failed: int
    turns: float
    prompt_tokens: float
    completion_tokens: float
    truncated: float
    """Share of answers cut off at the token limit."""
    policies: tuple[str, ...] = ()
    """Who answered: `name@version`, or `provider`."""
    rewards: dict[str, float] = {}
    """Mean of each reward component of its answers; empty for a role without a scorer."""
    reward: float | None = None
    """Mean over episodes of the reward that it is trained on; None for a role that is not trained, or has none."""


class EvaluatedMode(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one mode (base, trained, swapped, today) over the tasks.

    A task is one observation: the figures of `success`, `reward` and `outcome` are means over tasks of the mean over a
    task's episodes.

    `success` counts a failed episode as no success; it is None where the workflow reports no `success`. `reward` is the
    one that is trained on, `outcome` the plain sum of the outcome's components, None where that is the same; both count
    a failed episode as `on_failure` says in training. Episodes that the infrastructure has failed are in none of them,
    so `reward.n` may be below `episodes`. `failed` counts failed episodes by reason.
    """

    label: str = ""
    temperature: float | Literal["app"] | None = None
    """Sampling temperature of its calls; `app`: as the application asked. None where it is not known."""
    episodes: int
    success: Interval | None = None
    reward: Interval | None = None
    outcome: Interval | None = None
    roles: dict[str, RoleStatistics] = {}
    failed: dict[str, int] = {}
    seconds: float = 0.0
    use: ModeUse = ModeUse()
    scorer_errors: dict[str, int] = {}
    unlisted: dict[str, int] = {}
    """Calls by role that has no policy."""
    pass_at: dict[int, Interval] = {}
    """By k, the chance that one of k episodes of a task succeeds; empty for single episodes."""
    opposed: tuple[str, ...] = ()
    """Trained roles of which one's gain is another's loss: `success` says nothing of them, and there is no `reward` and
    no `outcome`."""
    floor: float = 0.0
    """The reward of a failed episode where it is the lowest."""
    reward_bounds: tuple[float, float] | None = None
    """The least and the greatest `reward` that is possible, where the scorers declare their bounds."""
    endings: dict[str, TaskEnding] = {}
    """By task id, how its first episode ended; empty in files that do not have them."""
    repeats: dict[str, tuple[TaskEnding, ...]] = {}
    """By task id, how its further episodes ended, if tasks were run more than once."""

    @property
    def failures(self) -> int:
        """How many episodes failed."""
        return sum(self.failed.values())

    @property
    def all_failed(self) -> str | None:
        """Why most episodes failed, where all did."""
        if not self.episodes or self.failures < self.episodes:
            return None
        return max(self.failed, key=self.failed.__getitem__)

    @property
    def rewards(self) -> dict[str, float]:
        """The trained reward by task: the mean of its episodes that have one."""
        return self._means(lambda ending: ending.reward)

    @property
    def outcomes(self) -> dict[str, float]:
        """The plain sum of the outcome's components by task: the mean of its episodes that have one."""
        return self._means(lambda ending: ending.outcome)

    @property
    def successes(self) -> dict[str, float]:
        """The share of each task's episodes that solved it: 1.0 or 0.0 of a single one. Empty if no episode reports
        `success`."""
        if all(ending.success is None for endings in self.by_task.values() for ending in endings):
            return {}
        return self._means(lambda ending: ending.solved)

    @property
    def calls_by_task(self) -> dict[str, float]:
        """The number of calls by task: the mean of its episodes that ended without an error, as others end early."""
        return self._means(lambda ending: None if ending.status != "ok" else ending.calls)

    @property
    def by_task(self) -> dict[str, tuple[TaskEnding, ...]]:
        """How all episodes of each task ended, the first one first."""
        return {task: (first, *self.repeats.get(task, ())) for task, first in self.endings.items()}

    def _means(self, figure: Callable[[TaskEnding], float | None]) -> dict[str, float]:
        means = {}
        for task, endings in self.by_task.items():
            known = [value for ending in endings if (value := figure(ending)) is not None]
            if known:
                means[task] = fmean(known)
        return means


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One mode minus another, over the tasks that both ran, and what that shows, in a sentence. `outcome` is there
    where it is not the trained reward, and `calls` is of the calls of an episode."""

    label: str = ""
    against: str = ""
    success: Interval | None = None
    reward: Interval | None = None
    outcome: Interval | None = None
    calls: Interval | None = None
    verdict: str = ""


class RoleEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is worth in one role against another one there, as the mean over all models of the other roles."""

    role: str
    model: str
    against: str
    difference: Interval
    of_success: bool = True
    """Whether the difference is of success; else of reward."""


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations by mode, their comparisons, and what was left out and why."""

    evaluations: dict[str, EvaluatedMode]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    steps: int | None = None
    """Those of the weights that were tried."""
    created: float = 0.0
    """Unix time; in a file that does not say, that of the file."""
    tasks: str = ""
    """The file of its tasks, where there was one."""
    assignments: dict[str, dict[str, str]] = {}
    """By evaluation, the model of each role, if all assignments of models to roles were evaluated."""
    effects: tuple[RoleEffect, ...] = ()
    """What each model is worth in each role; empty without assignments."""
    stored: str = ""
    """The folder that has it with its records; empty where it was not stored."""

    @property
    def broken(self) -> list[str]:
        """Modes in which every episode failed."""
        return [label for label, e in self.evaluations.items() if e.all_failed is not None]

    def require_some_episode(self) -> None:
        """Raise WorkflowError where every episode of every mode failed."""
        if len(self.broken) < len(self.evaluations):
            return
        failed = sum((Counter(e.failed) for e in self.evaluations.values()), Counter[str]())
        cause, count = failed.most_common(1)[0]
        total = failed.total()
        often = "" if count == total else f", {count} times"
        raise WorkflowError(
            f"All {total} episodes failed, so there is nothing to evaluate; the commonest cause{often}: {cause}",
            "Fix that first; cotune check runs the application without a model.",
        )

    def comparison(self, label: str, against: str) -> Comparison | None:
        """The comparison of two modes, if it was made."""
        return next((c for c in self.comparisons if (c.label, c.against) == (label, against)), None)

    def to_json(self) -> dict[str, Any]:
        """JSON values, as the file has them."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        del plain["stored"]
        return plain


class StoredEvaluation(EvaluationReport, frozen=True, kw_only=True):
    """An evaluation that was read from its file."""

    name: str = ""
    """What it is called on screens: its folder's name, or `in training, after step 40`."""
    records: str = ""
    """Path of the folder that has its episodes; empty where they were not kept."""


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
    return sorted(
        filter(None, map(read_if_whole, evaluation_files(run))), key=lambda one: (one.created, one.steps or 0)
    )


def most_telling(evaluations: Sequence[StoredEvaluation]) -> StoredEvaluation | None:
    """The newest evaluation that compares something, else the newest; None without any."""
    compared = [one for one in evaluations if one.comparisons]
    return next(reversed(compared or list(evaluations)), None)


def evaluation_files(run: Path) -> Iterator[Path]:
    """The files of a run's evaluations."""
    if (own := run / EVALUATION).is_file():
        yield own
    yield from sorted(run.glob(f"*/{EVALUATION}"))
    yield from sorted((run / HELD_OUT).glob("step-*.json"))


def in_training(run: Path, steps: int | None = None) -> list[StoredEvaluation]:
    """The evaluations that training made, by their steps; up to `steps`, where that is given."""
    made = map(read_if_whole, sorted((run / HELD_OUT).glob("step-*.json")))
    return [one for one in made if one is not None and (steps is None or (one.steps or 0) <= steps)]


def drop_after(run: Path, steps: int) -> None:
    """Remove training's evaluations of steps after `steps`: they are made again."""
    for file in (run / HELD_OUT).glob("step-*.json"):
        if int(file.stem.rpartition("-")[2]) > steps:
            file.unlink()


def read_if_whole(file: Path) -> StoredEvaluation | None:
    """The evaluation in a file; None, with a warning, where it cannot be read."""
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
    about = file.stat()
    found = _parsed(file, about.st_ino, about.st_mtime_ns, about.st_size)
    kept = str(records) if (records / RECORDS).is_file() else ""
    return msgspec.structs.replace(found, name=name, records=kept, created=found.created or about.st_mtime)


@functools.lru_cache(1024)
def _parsed(file: Path, *_: int) -> StoredEvaluation:
    """The content of a file, parsed once: later evaluations of a run read all earlier ones."""
    # `json` takes NaN, as a figure may be.
    return msgspec.convert(json.loads(file.read_bytes()), StoredEvaluation, str_keys=True)
