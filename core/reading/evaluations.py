"""The stored evaluations of a run: from `cotune eval`, and from training on its held-out tasks.

RUN/eval/evaluation.json, RUN/eval-2/evaluation.json, ...   `cotune eval`, with records.db next to each
RUN/held_out/step-000010.json                               training; its episodes are in RUN/records.db
"""

from __future__ import annotations

import functools
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
"""The folder of a run for training's evaluations."""
IN_TRAINING = "in training"
"""The beginning of the name of an evaluation from training."""


class TaskEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an episode of a task in one mode, after `seconds`.

    `reward` is the reward that is trained on, `by_role` the reward of each role, `outcome` the sum of the outcome's
    components; None if unknown. If the episode failed without an outcome, it counts with the lowest reward of the
    evaluation (`floored`) or the lowest outcome (`outcome_floored`). `known` is False if the episode was cancelled or
    the infrastructure failed: then it does not depend on the policies and counts in no figure.
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
        """Whether the episode solved its task, among episodes that report `success`.

        False if it failed or reports only an outcome. None if its result is unknown.
        """
        if self.status != "ok":
            return False if self.known else None
        if self.success is None and self.outcome is None:
            return None
        return self.success is True


class ModeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Calls, tokens, time and cost of the episodes of a mode. `seconds` is the mean of an episode. `uncounted` is the
    number of calls whose provider reported no tokens. `cost` is the cost of calls with a price, None without any;
    `unpriced` is the number of other calls."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    seconds: Interval | None = None
    cost: float | None = None
    unpriced: int = 0


class RoleStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one role. Means are per answered call; `turns` is per episode in which the role took part."""

    calls: int
    failed: int
    turns: float
    prompt_tokens: float
    completion_tokens: float
    truncated: float
    """Share of answers cut off at the token limit."""
    policies: tuple[str, ...] = ()
    """The policies that answered: `name@version`, or `provider`."""
    rewards: dict[str, float] = {}
    """Mean of each reward component of its answers; empty for a role without a scorer."""
    reward: float | None = None
    """Mean over episodes of the role's trained reward; None if the role is not trained or has no reward."""


class EvaluatedMode(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one mode (base, trained, swapped, today) over the tasks.

    A task is one observation: the figures of `success`, `reward` and `outcome` are means over tasks of the mean over a
    task's episodes.

    `success` counts a failed episode as unsolved; it is None if the workflow reports no `success`. `reward` is the
    trained reward, `outcome` the plain sum of the outcome's components, None if that is the same. Both count a failed
    episode as the setting `on_failure` says in training. Episodes that failed because of the infrastructure are in none
    of them, so `reward.n` may be below `episodes`. `failed` is the number of failed episodes by reason.
    """

    label: str = ""
    temperature: float | Literal["app"] | None = None
    """Sampling temperature of its calls; `app`: as the application asked. None if unknown."""
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
    """Number of calls of each role without a policy."""
    pass_at: dict[int, Interval] = {}
    """The chance that at least one of k episodes of a task succeeds, by k; empty if tasks ran once."""
    opposed: tuple[str, ...] = ()
    """Trained roles that play against each other: the gain of one is the loss of another. Then `success` does not
    measure them, and there is neither `reward` nor `outcome`."""
    floor: float = 0.0
    """The reward of failed episodes, if that is the lowest reward."""
    reward_bounds: tuple[float, float] | None = None
    """The lowest and the highest possible `reward`, if the scorers declare their bounds."""
    endings: dict[str, TaskEnding] = {}
    """The end of each task's first episode, by task id; empty in files that do not have them."""
    repeats: dict[str, tuple[TaskEnding, ...]] = {}
    """The ends of each task's other episodes, by task id, if tasks were run more than once."""

    @property
    def failures(self) -> int:
        """Number of failed episodes."""
        return sum(self.failed.values())

    @property
    def all_failed(self) -> str | None:
        """The commonest reason for a failure if all episodes failed; else None."""
        if not self.episodes or self.failures < self.episodes:
            return None
        return max(self.failed, key=lambda reason: self.failed[reason])

    @property
    def rewards(self) -> dict[str, float]:
        """The trained reward by task: the mean of its episodes with a reward."""
        return self._means(lambda ending: ending.reward)

    @property
    def outcomes(self) -> dict[str, float]:
        """The plain sum of the outcome's components by task: the mean of its episodes with an outcome."""
        return self._means(lambda ending: ending.outcome)

    @property
    def successes(self) -> dict[str, float]:
        """The share of each task's episodes that solved it; 1.0 or 0.0 for a single episode. Empty if no episode
        reports `success`."""
        for endings in self.by_task.values():
            if any(ending.success is not None for ending in endings):
                return self._means(lambda ending: ending.solved)
        return {}

    @property
    def calls_by_task(self) -> dict[str, float]:
        """The number of calls by task: the mean of its episodes without an error. Failed episodes end early."""
        return self._means(lambda ending: None if ending.status != "ok" else ending.calls)

    @property
    def by_task(self) -> dict[str, tuple[TaskEnding, ...]]:
        """The ends of all episodes of each task, the first one first."""
        return {task: (first, *self.repeats.get(task, ())) for task, first in self.endings.items()}

    def _means(self, figure: Callable[[TaskEnding], float | None]) -> dict[str, float]:
        """The mean of a figure over the episodes of each task that have it; tasks without any are left out."""
        means: dict[str, float] = {}
        for task, endings in self.by_task.items():
            values = [value for ending in endings if (value := figure(ending)) is not None]
            if values:
                means[task] = fmean(values)
        return means


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One mode minus another over the tasks that both ran, with a conclusion in a sentence. `outcome` is None if it is
    the trained reward; `calls` is the difference in calls per episode."""

    label: str = ""
    against: str = ""
    success: Interval | None = None
    reward: Interval | None = None
    outcome: Interval | None = None
    calls: Interval | None = None
    verdict: str = ""


class RoleEffect(msgspec.Struct, frozen=True, kw_only=True):
    """The gain from one model instead of another in a role, as the mean over all models of the other roles."""

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
    """Number of training steps of the evaluated weights; None if unknown."""
    created: float = 0.0
    """Unix time; if the file does not say it, the time of the file."""
    tasks: str = ""
    """The file of its tasks; empty without one."""
    assignments: dict[str, dict[str, str]] = {}
    """By evaluation, the model of each role, if all assignments of models to roles were evaluated."""
    effects: tuple[RoleEffect, ...] = ()
    """The effect of each model in each role; empty without assignments."""
    stored: str = ""
    """The folder with the evaluation and its records; empty if it was not stored."""

    @property
    def broken(self) -> list[str]:
        """Modes in which every episode failed."""
        return [label for label, e in self.evaluations.items() if e.all_failed is not None]

    def require_some_episode(self) -> None:
        """Raise WorkflowError if every episode of every mode failed."""
        if len(self.broken) < len(self.evaluations):
            return
        failed: Counter[str] = Counter()
        for mode in self.evaluations.values():
            failed.update(mode.failed)
        cause, count = failed.most_common(1)[0]
        total = failed.total()
        times = "" if count == total else f", {count} times"
        raise WorkflowError(
            f"All {total} episodes failed, so there is nothing to evaluate; the commonest cause{times}: {cause}",
            "Fix that first; cotune check runs the application without a model.",
        )

    def comparison(self, label: str, against: str) -> Comparison | None:
        """The comparison of two modes, if it was made."""
        return next((c for c in self.comparisons if (c.label, c.against) == (label, against)), None)

    def to_json(self) -> dict[str, Any]:
        """The evaluation as JSON values, as in its file."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        del plain["stored"]
        return plain


class StoredEvaluation(EvaluationReport, frozen=True, kw_only=True):
    """An evaluation that was read from its file."""

    name: str = ""
    """Its name on screens: the name of its folder, or `in training, after step 40`."""
    records: str = ""
    """Path of the folder with its episodes; empty if there are no records."""


def claim_folder(run: Path) -> Path:
    """Create the folder of the run's next evaluation: RUN/eval, or the first free one of RUN/eval-2, ... Raises OSError
    if it cannot be created."""
    number = 1
    while True:
        folder = run / (FOLDER if number == 1 else f"{FOLDER}-{number}")
        try:
            # Another process may create the same folder, so only `mkdir` itself shows that the name is free.
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def step_file(run: Path, steps: int) -> Path:
    """The file of training's evaluation after this number of steps."""
    return run / HELD_OUT / f"step-{steps:06d}.json"


def _steps_of_file(file: Path) -> int:
    """The number of steps in the name of a `step_file`."""
    return int(file.stem.rpartition("-")[2])


def read_evaluation(folder: Path) -> StoredEvaluation:
    """The evaluation in a folder. Raises ConfigError if it cannot be read."""
    try:
        return _read(folder / EVALUATION, folder.name, folder)
    except (OSError, ValueError, RecursionError) as error:
        fault = f"must be a folder that `cotune eval --out` wrote ({error})"
        raise ConfigError("evaluation", str(folder), fault, "Evaluate the run with --out FOLDER.") from None


def read_evaluations(run: Path) -> list[StoredEvaluation]:
    """All evaluations of a run, the oldest first: from `cotune eval`, in folders of the run or in `run` itself, and
    from training. An evaluation that cannot be read is left out with a warning."""
    evaluations = [stored for file in evaluation_files(run) if (stored := read_if_whole(file)) is not None]
    return sorted(evaluations, key=lambda stored: (stored.created, stored.steps or 0))


def most_telling(evaluations: Sequence[StoredEvaluation]) -> StoredEvaluation | None:
    """The newest evaluation with a comparison, or else the newest one; None without any. `evaluations` has the oldest
    first."""
    for stored in reversed(evaluations):
        if stored.comparisons:
            return stored
    return evaluations[-1] if evaluations else None


def evaluation_files(run: Path) -> Iterator[Path]:
    """The files of a run's evaluations."""
    if (run / EVALUATION).is_file():
        yield run / EVALUATION
    yield from sorted(run.glob(f"*/{EVALUATION}"))
    yield from sorted((run / HELD_OUT).glob("step-*.json"))


def in_training(run: Path, steps: int | None = None) -> list[StoredEvaluation]:
    """Training's evaluations in the order of their steps, up to `steps` if it is not None."""
    evaluations: list[StoredEvaluation] = []
    for file in sorted((run / HELD_OUT).glob("step-*.json")):
        stored = read_if_whole(file)
        if stored is None:
            continue
        if steps is None or (stored.steps or 0) <= steps:
            evaluations.append(stored)
    return evaluations


def drop_after(run: Path, steps: int) -> None:
    """Remove training's evaluations after the step `steps`. Training will evaluate these steps again."""
    for file in (run / HELD_OUT).glob("step-*.json"):
        if _steps_of_file(file) > steps:
            file.unlink()


def read_if_whole(file: Path) -> StoredEvaluation | None:
    """The evaluation in a file; None, with a warning, if it cannot be read."""
    try:
        if file.name == EVALUATION:
            return _read(file, file.parent.name, file.parent)
        steps = _steps_of_file(file)
        when = f"after step {steps}" if steps else "before the first step"
        return _read(file, f"{IN_TRAINING}, {when}", file.parent.parent)
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is left out: it cannot be read: %s", file, error)
        return None


def _read(file: Path, name: str, records: Path) -> StoredEvaluation:
    """The evaluation in a file. `name` is its name on screens, and `records` the folder that may hold its episodes."""
    stat = file.stat()
    stored = _parse(file, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    folder = str(records) if (records / RECORDS).is_file() else ""
    return msgspec.structs.replace(stored, name=name, records=folder, created=stored.created or stat.st_mtime)


@functools.lru_cache(1024)
def _parse(file: Path, inode: int, changed_ns: int, size: int) -> StoredEvaluation:
    """The content of a file, parsed once: later evaluations of a run read all earlier ones.

    The arguments besides the file are only the key of the cache: a changed file is parsed again.
    """
    # `json`, as a figure may be NaN, which msgspec does not accept.
    return msgspec.convert(json.loads(file.read_bytes()), StoredEvaluation, str_keys=True)
