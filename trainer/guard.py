"""The guard: finds in a run's metrics that training has collapsed, and names the checkpoint to go back to."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from cotune.algorithms.samples import Floats
from cotune.storage.checkpoints import checkpoint_name, step_folders, steps_of
from cotune.storage.metrics_file import StepMetrics, read_metrics
from cotune.trainer.run.run import RolloutRun, Run

Line = Mapping[str, Any]
"""One step of metrics.jsonl, as plain data."""
Watched = Literal["each", "together", "none"]
"""Whether the rewards of roles are watched one by one, as their mean, or not at all."""

WINDOW = 5
"""The number of steps whose mean is compared. A mean of fewer steps follows single batches, a mean of more steps shows
a fall late."""
REWARD_DROP = 0.5
"""A fall must lose this share of the reward's gain, or of half its best mean. From smaller falls a run may recover."""
NOISE = 5.0
"""A fall must exceed this many standard errors. The best window is the luckiest of many, so four are too few: of
simulated runs of 300 steps whose reward only wavers, four raise an alarm in 28%, five in 2%. A fall from 0.6 to 0.1 at
16 tasks a step is still noticed after four steps."""
MAX_GAP = 0.25
"""The largest mean difference between sampler and learner, in nats a token. At 0.25 the probability ratio of an average
token is 1.28, where the widest common loss (clip_high of DAPO) begins to clip, so updates no longer follow the
rewards."""


def find_collapse(lines: Sequence[Line], rewards: Watched = "each", taught: Container[str] = ()) -> str | None:
    """Describe how training has collapsed in the last `WINDOW` steps; None if it has not.

    `rewards` says how the rewards of roles are watched. Rewards of roles in `taught`, which learn from a teacher, are
    not watched.
    """
    if len(lines) < WINDOW:
        return None

    # The watched rewards of all steps, by their name. A role that does not learn in every step is only compared with
    # the steps in which it does.
    series_by_name: dict[str, list[float]] = {}
    for line in lines:
        for name, reward in _watched_rewards(line, rewards, taught).items():
            series_by_name.setdefault(name, []).append(reward)
    for name, series in sorted(series_by_name.items()):
        fall = _describe_fall(series)
        if fall is not None:
            return f"{name} {fall}"

    gaps_of_role: dict[str, list[float]] = {}
    for line in lines[-WINDOW:]:
        for role, figures in line["roles"].items():
            if "sampler_gap_mean" in figures:
                gaps_of_role.setdefault(role, []).append(figures["sampler_gap_mean"])
    for role, gaps in sorted(gaps_of_role.items()):
        gap = _mean(gaps)
        if gap > MAX_GAP:
            return f"sampler and learner disagree on role {role} by {gap:.2f} nats a token, above {MAX_GAP}"
    return None


def best_window(lines: Sequence[Line]) -> int | None:
    """Find the window with the best mean reward over all roles. Returns the number of steps that were done at its end;
    None if no window has ended."""
    steps_done = []
    means = []
    for line in lines:
        mean = _mean([*_rewards(line).values()])
        if math.isfinite(mean):
            steps_done.append(line["step"] + 1)
            means.append(mean)
    if len(means) < WINDOW:
        return None
    first = int(np.argmax(_window_means(means)))
    return int(steps_done[first + WINDOW - 1])


def of_one_level(lines: Sequence[Line], level: Callable[[int], int]) -> list[Line]:
    """Return the lines of steps whose tasks have the same difficulty as the tasks of the last step. Only these can be
    compared. `level` returns the difficulty of a step."""
    return [line for line in lines if level(line["step"]) == level(lines[-1]["step"])]


def watch(run: RolloutRun, metrics: StepMetrics) -> str:
    """Return the guard's warning after a step; an empty text if there is none. The step's `metrics` are not yet in
    metrics.jsonl.

    With `guard = "stop"` a collapse also ends the run. While a collapse lasts, each step gets the warning of the first
    one.
    """
    if run.config.guard == "off":
        return ""
    lines = of_one_level([*read_metrics(run.folder.path), msgspec.to_builtins(metrics)], run.schedule.level)
    taught = {role for role, name in run.trained.items() if not run.recipes.of(name).takes_rewards}
    collapse = find_collapse(lines, _choose_watched(run), taught)
    if collapse is None:
        run.collapse = ""
        return ""
    if run.config.guard == "stop":
        run.ended = f"the guard: {collapse}"
        run.way_back = way_back(run)
        return ""
    if not run.collapse:
        run.collapse = f"The guard: {collapse}. {way_back(run)}"
    return run.collapse


def _choose_watched(run: RolloutRun) -> Watched:
    """Choose which rewards can show a collapse: the rewards of each role, their mean over roles, or none."""
    recipes = [recipe for recipe in run.recipes_of_training if recipe.takes_rewards]
    # An adaptive pool draws harder tasks as policies improve, so lower rewards may mean progress.
    if not recipes or run.config.curriculum.pool == "adaptive":
        return "none"
    # If roles play against each other, one gains what another loses, so only their mean can show a collapse.
    for recipe in recipes:
        rewards_single_roles = any("/" in name for name in recipe.attribution.weights)
        if recipe.attribution.seats or rewards_single_roles:
            return "together"
    return "each"


def way_back(run: Run) -> str:
    """Return the two commands that start again from the checkpoint of the best window, as a sentence for the user."""
    name = safe_checkpoint(run)
    if name is None:
        return "No checkpoint of a better time was kept."
    described = run.folder.described
    step = str(steps_of(run.folder.checkpoints / name))
    export = ["cotune", "export", str(run.folder.path), "--step", step, "--out", "good"]
    train = ["cotune", "train", described.get("workflow") or "app:solve"]
    if described.get("tasks"):
        train += ["--tasks", described["tasks"]]
    train += ["--init", "good"]
    return (
        f"{name} is the checkpoint of the run's best {WINDOW} steps. To train on from it, with the settings that you "
        f"choose now: {shlex.join(export)}; then: {shlex.join(train)}"
    )


def safe_checkpoint(run: Run, pending: int | None = None) -> str | None:
    """Return the name of the newest checkpoint that was written at or before the end of the best window; None without
    one. Its policies are from before a fall of the rewards, so a run can start again from it.

    The best window is the `WINDOW` steps in a row with the highest mean reward. Only steps whose tasks have the present
    difficulty are compared. `pending` is the number of steps of a checkpoint that is about to be written.
    """
    if run.config.guard == "off" or run.config.from_records:
        return None
    lines = read_metrics(run.folder.path)
    if not lines:
        return None
    compared = of_one_level(lines, run.schedule.level)
    most_steps = best_window(compared)
    if most_steps is None:
        # The tasks have changed less than a window ago: take the last checkpoint before the change. The first step with
        # the new tasks, counted from 0, is the number of steps that were done before it.
        most_steps = compared[0]["step"]
    if not most_steps:
        return None
    steps_of_checkpoints = [steps_of(path) for path in step_folders(run.folder.checkpoints)]
    if pending is not None:
        steps_of_checkpoints.append(pending)
    return max((checkpoint_name(steps) for steps in steps_of_checkpoints if steps <= most_steps), default=None)


def _describe_fall(series: Sequence[float]) -> str | None:
    """Describe the fall of a reward from the mean of its best window to the mean of the last one; None if the fall is
    small or may be noise."""
    if len(series) < 2 * WINDOW:
        return None
    means = _window_means(series)
    best = float(means.max())
    last = float(means[-1])
    gain = max(best - float(means[0]), abs(best) / 2)
    # The noise of one step, from the differences between neighbours. A slow rise hardly adds to it. A difference of
    # two steps has twice the variance of one.
    variance_of_step = float(np.mean(np.diff(series) ** 2)) / 2
    standard_error = math.sqrt(variance_of_step * 2 / WINDOW)  # of the difference of two windows
    if best - last <= REWARD_DROP * gain or best - last <= NOISE * standard_error:
        return None
    return f"fell from {best:.3f} to {last:.3f} (means over {WINDOW} steps)"


def _window_means(series: Sequence[float]) -> Floats:
    """Return the mean of each `WINDOW` steps in a row, [steps - WINDOW + 1]."""
    return np.convolve(np.asarray(series, np.float64), np.full(WINDOW, 1 / WINDOW), "valid")


def _watched_rewards(line: Line, rewards: Watched, taught: Container[str]) -> dict[str, float]:
    """Return the watched rewards of a step, by a name for messages."""
    reward_of_role = {role: reward for role, reward in _rewards(line).items() if role not in taught}
    if rewards == "each":
        return {f"the reward of role {role}": reward for role, reward in reward_of_role.items()}
    if rewards == "together" and reward_of_role:
        return {"the mean reward of all roles": _mean([*reward_of_role.values()])}
    return {}


def _rewards(line: Line) -> dict[str, float]:
    """Return the mean reward of each role in a step."""
    return {role: figures["reward"] for role, figures in line["roles"].items() if "reward" in figures}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
