"""The guard: tells from the metrics of a run that training has broken down, before more is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cotune.storage.checkpoints import checkpoint_name, step_folders, steps_of
from cotune.storage.metrics_file import read_metrics
from cotune.storage.run_layout import Rollback
from cotune.trainer.config.guard import GuardConfig
from cotune.trainer.run.restore import go_back
from cotune.trainer.run.run import RolloutRun, Run

Line = Mapping[str, Any]
Watched = Literal["each", "together", "none"]

REWARD_DROP = 0.5
"""Share of its gain, or of half its best, that a collapsed reward has lost."""
NOISE = 4.0
"""Standard errors that a fall must exceed."""


def collapse(
    lines: Sequence[Line], config: GuardConfig, rewards: Watched = "each", taught: Container[str] = ()
) -> str | None:
    """What has collapsed in the last `window` steps of these metrics, in one sentence; None where nothing has.

    A reward has where its mean over the window is below that of the best window by more than `REWARD_DROP` of what the
    run had gained since its first window (or of half the best, if that is more), and by more than four standard errors
    of both. Watched is what each role is trained on, or its mean over the roles where they are taken `together`, as one
    may gain what another loses; of roles in `taught`, which learn from a teacher, it is not.
    """
    if len(lines) < config.window:
        return None
    watched = [_watched(line, rewards, taught) for line in lines]
    for name in sorted({name for own in watched for name in own}):
        series = [own[name] for own in watched if name in own]
        if said := _fallen(name, series, config.window):
            return said
    for role in sorted({role for line in lines for role in line["roles"]}):
        recent = [line["roles"].get(role, {}) for line in lines[-config.window :]]
        entropy = _mean([figures["entropy"] for figures in recent if "entropy" in figures])
        if config.min_entropy is not None and entropy < config.min_entropy:
            return f"the entropy of role {role} is {entropy:.4f}, below guard.min_entropy = {config.min_entropy}"
        gap = _mean([figures["sampler_gap_mean"] for figures in recent if "sampler_gap_mean" in figures])
        if config.max_gap is not None and gap > config.max_gap:
            return f"sampler and learner disagree on role {role} by {gap:.4f}, above guard.max_gap = {config.max_gap}"
    return None


def best_window(lines: Sequence[Line], window: int) -> int | None:
    """Steps done at the end of the window whose mean reward, over all roles, was the best; None without one."""
    totals = [(line["step"] + 1, mean) for line in lines if math.isfinite(mean := _mean([*_rewards(line).values()]))]
    if len(totals) < window:
        return None
    means = np.convolve([mean for _, mean in totals], np.full(window, 1 / window), "valid")
    return int(totals[int(np.argmax(means)) + window - 1][0])


def of_one_level(lines: Sequence[Line], level: Callable[[int], int]) -> list[Line]:
    """The lines since the tasks last became harder or easier, by the `level` of a step: only these compare."""
    return [line for line in lines if level(line["step"]) == level(lines[-1]["step"])]


def watch(run: RolloutRun) -> None:
    """End the run where training has collapsed."""
    if run.config.guard.action != "off":
        recipes = [recipe for recipe in run.recipes_of_training if recipe.takes_rewards]
        opposed = any(how.seats or any("/" in name for name in how.weights) for how in (r.attribution for r in recipes))
        rewards: Watched = ("together" if opposed else "each") if recipes else "none"
        if run.config.curriculum.pool == "adaptive":  # harder tasks by and by
            rewards = "none"
        taught = {role for role, name in run.trained.items() if not run.recipes.of(name).takes_rewards}
        said = collapse(_lines(run), run.config.guard, rewards, taught)
        if said is not None:
            run.ended = f"the guard: {said}"
            run.collapsed = True


def safe_checkpoint(run: Run) -> str | None:
    """Name of the newest checkpoint that is no younger than the best window's end; None where there is none."""
    if run.config.guard.action != "roll_back":
        return None
    lines = _lines(run)
    end = best_window(lines, run.config.guard.window)
    if end is None and lines and lines[0]["step"]:
        end = lines[0]["step"]  # before these tasks
    there = [steps_of(path) for path in step_folders(run.folder.checkpoints)]
    before = [steps for steps in [*there, run.state.steps] if end is not None and steps <= end]
    return checkpoint_name(max(before)) if before else None


def _lines(run: Run) -> list[Line]:
    """The metrics of the steps that compare with the last one."""
    lines = read_metrics(run.folder.path)
    return of_one_level(lines, run.schedule.level) if lines else []


def roll_back(run: Run) -> None:
    """After a collapse: go back to the checkpoint of the run's best time, which export and --resume take. The steps
    after it are abandoned."""
    safe = safe_checkpoint(run) if run.collapsed else None
    if safe is not None:
        state = run.state
        back = Rollback(steps_of(Path(safe)), state.steps, run.ended, dict(state.versions))
        go_back(run.folder, run.store, back)
        run.ended = f"{run.ended}; rolled back to {safe}"


def _fallen(name: str, series: Sequence[float], window: int) -> str | None:
    if len(series) < 2 * window:
        return None
    values = np.asarray(series, np.float64)
    means = np.convolve(values, np.full(window, 1 / window), "valid")
    best = int(np.argmax(means))
    drop, had = means[best] - means[-1], max(means[best] - means[0], abs(means[best]) / 2)
    spread = values[best : best + window].var(ddof=1) + values[-window:].var(ddof=1)
    if drop <= REWARD_DROP * had or drop <= NOISE * math.sqrt(spread / window):
        return None
    return f"{name} fell from {means[best]:.3f} to {means[-1]:.3f} (means over {window} steps)"


def _watched(line: Line, rewards: Watched, taught: Container[str]) -> dict[str, float]:
    own = {role: value for role, value in _rewards(line).items() if role not in taught}
    if rewards == "each":
        return {f"the reward of role {role}": value for role, value in own.items()}
    return {"the mean reward of all roles": _mean([*own.values()])} if own and rewards == "together" else {}


def _rewards(line: Line) -> dict[str, float]:
    """What each role is trained on, each task once: fewer episodes of easy tasks change nothing."""
    return {role: own["task_reward"] for role, own in line["roles"].items() if "task_reward" in own}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
