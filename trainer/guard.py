"""The guard: finds in a run's metrics that training has collapsed, and names the checkpoint to go back to."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from cotune.storage.checkpoints import checkpoint_name, step_folders, steps_of
from cotune.storage.metrics_file import StepMetrics, read_metrics
from cotune.trainer.run.run import RolloutRun, Run

Line = Mapping[str, Any]
"""One step of metrics.jsonl, as plain data."""
Watched = Literal["each", "together", "none"]
"""Whether the rewards of roles are watched one by one, as their mean, or not at all."""

WINDOW = 5
"""Steps whose mean is compared. A mean of fewer steps follows single batches, one of more steps shows a fall late."""
REWARD_DROP = 0.5
"""Share of its gain, or of half its best mean, that a reward must lose. Below that a run may well recover."""
NOISE = 5.0
"""Standard errors that a fall must exceed. The best window is the luckiest of many, so four are too few: of simulated
runs of 300 steps whose reward only wavers, four raise an alarm in 28%, five in 2%. A fall from 0.6 to 0.1 at 16 tasks a
step is still noticed after four steps."""
MAX_GAP = 0.25
"""Mean difference between sampler and learner, in nats a token. At 0.25 the probability ratio of an average token is
1.28, where the widest common loss (clip_high of DAPO) begins to clip, so updates no longer follow the rewards."""


def find_collapse(lines: Sequence[Line], rewards: Watched = "each", taught: Container[str] = ()) -> str | None:
    """The sentence that says how training has collapsed in the last `WINDOW` steps, or None if it has not.

    Roles in `taught` learn from a teacher, so their rewards are not watched.
    """
    if len(lines) < WINDOW:
        return None

    rewards_of_steps = [_watched_rewards(line, rewards, taught) for line in lines]
    for name in sorted({name for of_step in rewards_of_steps for name in of_step}):
        # A role that does not learn in every step is compared with the steps in which it does.
        series = [of_step[name] for of_step in rewards_of_steps if name in of_step]
        if fall := _describe_fall(series):
            return f"{name} {fall}"

    for role in sorted({role for line in lines for role in line["roles"]}):
        figures = [line["roles"].get(role, {}) for line in lines[-WINDOW:]]
        gap = _mean([of_step["sampler_gap_mean"] for of_step in figures if "sampler_gap_mean" in of_step])
        if gap > MAX_GAP:
            return f"sampler and learner disagree on role {role} by {gap:.2f} nats a token, above {MAX_GAP}"
    return None


def best_window(lines: Sequence[Line]) -> int | None:
    """How many steps were done at the end of the window whose mean reward, over all roles, was the best; None if no
    window has ended."""
    steps_done = []
    means = []
    for line in lines:
        mean = _mean([*_rewards(line).values()])
        if math.isfinite(mean):
            steps_done.append(line["step"] + 1)
            means.append(mean)
    if len(means) < WINDOW:
        return None
    windows = np.convolve(means, np.full(WINDOW, 1 / WINDOW), "valid")
    return int(steps_done[int(np.argmax(windows)) + WINDOW - 1])


def of_one_level(lines: Sequence[Line], level: Callable[[int], int]) -> list[Line]:
    """The lines since the tasks last became harder or easier, by the `level` of a step: only these compare."""
    return [line for line in lines if level(line["step"]) == level(lines[-1]["step"])]


def watch(run: RolloutRun, metrics: StepMetrics) -> str:
    """The guard's warning after the step of these metrics, which are not yet written, or an empty text.

    With `guard = "stop"` a collapse also ends the run. While a collapse lasts, each step gets the text of the first.
    """
    if run.config.guard == "off":
        return ""
    lines = of_one_level([*read_metrics(run.folder.path), msgspec.to_builtins(metrics)], run.schedule.level)
    taught = {role for role, name in run.trained.items() if not run.recipes.of(name).takes_rewards}
    how = find_collapse(lines, _choose_watched(run), taught)
    if how is None:
        run.collapse = ""
        return ""
    if run.config.guard == "stop":
        run.ended = f"the guard: {how}"
        run.way_back = way_back(run)
        return ""
    run.collapse = run.collapse or f"The guard: {how}. {way_back(run)}"
    return run.collapse


def _choose_watched(run: RolloutRun) -> Watched:
    """Decide which rewards can show a collapse: of each role, their mean over roles, or none."""
    recipes = [recipe for recipe in run.recipes_of_training if recipe.takes_rewards]
    # An adaptive pool draws harder tasks as policies improve, so lower rewards may mean progress.
    if not recipes or run.config.curriculum.pool == "adaptive":
        return "none"
    # Between opponents, one wins what another loses.
    attributions = [recipe.attribution for recipe in recipes]
    opposed = any(how.seats or any("/" in name for name in how.weights) for how in attributions)
    return "together" if opposed else "each"


def way_back(run: Run) -> str:
    """How to start again from the best window's checkpoint: two commands."""
    name = safe_checkpoint(run)
    if name is None:
        return "No checkpoint of a better time was kept."
    described = run.folder.described
    source = ["cotune", "export", str(run.folder.path), "--step", str(steps_of(run.folder.checkpoints / name))]
    train = ["cotune", "train", described.get("workflow") or "app:solve"]
    if described.get("tasks"):
        train += ["--tasks", described["tasks"]]
    return (
        f"{name} is the checkpoint of the run's best {WINDOW} steps. To train on from it, with the settings that you "
        f"choose now: {shlex.join([*source, '--out', 'good'])}; then: {shlex.join([*train, '--init', 'good'])}"
    )


def safe_checkpoint(run: Run, pending: int | None = None) -> str | None:
    """Name of the newest checkpoint written at or before the end of the best window; None if there is none. To
    train again from it is safe, as its policies are from before a fall of the rewards.

    The best window is the `WINDOW` steps in a row with the highest mean reward. Only steps whose tasks are of the
    present difficulty are compared. `pending` is the number of steps of a checkpoint that is about to be written.
    """
    if run.config.guard == "off" or run.config.from_records:
        return None
    lines = read_metrics(run.folder.path)
    compared = of_one_level(lines, run.schedule.level) if lines else []
    end = best_window(compared)
    # With new tasks since less than a window, no window compares: take the last checkpoint before the change. The
    # first step with the new tasks, counted from 0, is the number of steps that were done before it.
    if end is None and compared and compared[0]["step"]:
        end = compared[0]["step"]
    if end is None:
        return None
    steps = [steps_of(path) for path in step_folders(run.folder.checkpoints)]
    if pending is not None:
        steps.append(pending)
    return max((checkpoint_name(count) for count in steps if count <= end), default=None)


def _describe_fall(series: Sequence[float]) -> str | None:
    """Describe the fall from the mean of the best window to the last one; None if it is within the bounds."""
    if len(series) < 2 * WINDOW:
        return None
    values = np.asarray(series, np.float64)
    means = np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid")
    best = float(means.max())
    last = float(means[-1])
    gain = max(best - float(means[0]), abs(best) / 2)
    # The noise of one step, from the differences between neighbours: a slow rise hardly adds to these.
    variance = float(np.mean(np.diff(values) ** 2)) / 2
    standard_error = math.sqrt(variance * 2 / WINDOW)
    if best - last <= REWARD_DROP * gain or best - last <= NOISE * standard_error:
        return None
    return f"fell from {best:.3f} to {last:.3f} (means over {WINDOW} steps)"


def _watched_rewards(line: Line, rewards: Watched, taught: Container[str]) -> dict[str, float]:
    """The rewards of a step that are watched, by a name for messages."""
    of_roles = {role: value for role, value in _rewards(line).items() if role not in taught}
    if rewards == "each":
        return {f"the reward of role {role}": value for role, value in of_roles.items()}
    if rewards == "together" and of_roles:
        return {"the mean reward of all roles": _mean([*of_roles.values()])}
    return {}


def _rewards(line: Line) -> dict[str, float]:
    """The mean trained reward of each role over tasks."""
    return {role: figures["reward"] for role, figures in line["roles"].items() if "reward" in figures}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
