"""The best checkpoint of each policy by held-out evaluation, and the end of a run that no longer improves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cotune.storage.checkpoints import Best, checkpoint_name, read_best, steps_of
from cotune.storage.metrics_file import read_metrics
from cotune.trainer.evaluation.held_out import AGAINST_UNTRAINED, start_figures
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.run.checkpoint import write_best
from cotune.trainer.run.run import RolloutRun


def judged_figures(
    held_out: Mapping[str, float], policies: Mapping[str, list[str]], *, seats: bool
) -> dict[str, float]:
    """Return the figure by which an evaluation judges each policy; a policy without a figure is left out.

    `policies` has the roles of each policy by name. All policies are judged by `success`. Without it, or if each role
    has an outcome of its own (`seats`), a policy is judged by the mean reward that its roles are trained on. Roles that
    play against each other are judged by their reward against the untrained model.
    """
    play_against_each_other = is_game(held_out)
    if "success" in held_out and not seats and not play_against_each_other:
        return dict.fromkeys(policies, held_out["success"])
    prefix = AGAINST_UNTRAINED if play_against_each_other else "reward"
    figures: dict[str, float] = {}
    for name, roles in policies.items():
        figure_names = [f"{prefix}/{role}" for role in roles]
        rewards = [held_out[figure_name] for figure_name in figure_names if figure_name in held_out]
        if rewards:
            figures[name] = fmean(rewards)
    return figures


def is_game(held_out: Mapping[str, float]) -> bool:
    """Return whether the roles of an evaluation play against each other."""
    return any(name.startswith(f"{AGAINST_UNTRAINED}/") for name in held_out)


def note_start(run: RolloutRun) -> None:
    """Before the first step, note the policies that `init` names as the best so far, so that their checkpoint stays."""
    config = run.config.evaluation
    if run.config.init and not run.best and (config.keep_best or config.patience):
        run.best = _best_checkpoints(run, read_metrics(run.folder.path))


def note_best(run: RolloutRun, held_out: Mapping[str, float], progress: Progress) -> bool:
    """After a step with an evaluation, note the policies that are better than at any earlier evaluation.

    Returns whether there are any, so that the checkpoint of this step is kept. Ends the run if no policy has improved
    for `evaluation.patience` evaluations.
    """
    config = run.config.evaluation
    if not held_out or not (config.keep_best or config.patience):
        return False
    lines = read_metrics(run.folder.path)
    if not is_game(held_out) and any(is_game(line["held_out"]) for line in lines):
        progress.say_once("no held-out game had a winner in this evaluation, so it judges no policy")
        return False
    if not _figures(run, held_out):
        names = ", ".join(name for name in held_out if name not in ("episodes", "failed")) or "none"
        progress.say_once(
            f"the held-out episodes have no reward that is trained on, so no checkpoint is best; known: {names}"
        )
        return False
    checkpoint = checkpoint_name(run.state.steps)
    run.best = {**run.best, **_best_checkpoints(run, lines, checkpoint)}
    better = any(best.checkpoint == checkpoint for best in run.best.values())
    if config.patience is None or better:
        return better

    # Patience counts the evaluations after the newest of the best checkpoints. A line without figures is a step without
    # an evaluation.
    newest_best = max(steps_of(Path(best.checkpoint)) for best in run.best.values())
    evaluations_since = 0
    for line in lines:
        steps_done = line["step"] + 1
        if steps_done > newest_best and line["held_out"]:
            evaluations_since += 1
    if evaluations_since >= config.patience:
        when = f"after step {newest_best}" if newest_best else "before the first step"
        run.ended = f"{evaluations_since} evaluations in a row were no better than the one {when}"
    return False


def find_best(run: RolloutRun) -> list[str]:
    """Find the best checkpoints of a resumed run in metrics.jsonl, among the checkpoints that still exist.

    Writes `best.json` again if it names others. Returns a note for each best checkpoint that is gone.
    """
    config = run.config.evaluation
    folder = run.folder.checkpoints
    if not (config.keep_best or config.patience):
        return []
    best_checkpoints = _best_checkpoints(run, read_metrics(run.folder.path))
    run.best = best_checkpoints
    if not config.keep_best:
        return []
    notes = []
    stored_best = read_best(folder)
    for policy, best in stored_best.items():
        exists = (folder / best.checkpoint).is_dir() and steps_of(Path(best.checkpoint)) <= run.state.steps
        if exists:
            best_checkpoints.setdefault(policy, best)
            continue
        note = f"the best checkpoint of {policy} was {best.checkpoint} ({best.figure:.3f}), which is gone"
        if policy in best_checkpoints:
            replacement = best_checkpoints[policy]
            note += f"; the best that is left is {replacement.checkpoint} ({replacement.figure:.3f})"
        else:
            note += "; no other was kept"
        notes.append(note)
    if best_checkpoints != stored_best:
        write_best(folder, best_checkpoints)
    return notes


def _best_checkpoints(run: RolloutRun, lines: Sequence[Mapping[str, Any]], current: str = "") -> dict[str, Best]:
    """The best held-out evaluation of each policy in these lines of metrics.jsonl. If several are equal, the earliest.

    A run that starts from other policies (`init`) may be best before its first step. With `keep_best`, an evaluation
    counts only if its checkpoint exists, or is `current`, which is about to be written.
    """
    # Figures of games and of ordinary evaluations cannot be compared: if any evaluation is a game, only games count.
    evaluated = [(line["step"] + 1, line["held_out"]) for line in lines if line["held_out"]]
    games = [(steps, held_out) for steps, held_out in evaluated if is_game(held_out)]
    if games:
        evaluated = games
    elif run.config.init:
        evaluated.insert(0, (0, start_figures(run)))

    best_checkpoints: dict[str, Best] = {}
    for steps, held_out in evaluated:
        name = checkpoint_name(steps)
        if run.config.evaluation.keep_best and name != current and not (run.folder.checkpoints / name).is_dir():
            continue
        for policy, figure in _figures(run, held_out).items():
            if policy not in best_checkpoints or figure > best_checkpoints[policy].figure:
                best_checkpoints[policy] = Best(name, figure)
    return best_checkpoints


def _figures(run: RolloutRun, held_out: Mapping[str, float]) -> dict[str, float]:
    """Return the figure by which an evaluation judges each trained policy that plays a role."""
    policies = run.state.policies
    roles_of_policy: dict[str, list[str]] = {}
    for name in policies.trained:
        if roles := policies.roles_of(name):
            roles_of_policy[name] = roles
    seats = any(recipe.attribution.seats for recipe in run.recipes_of_training)
    return judged_figures(held_out, roles_of_policy, seats=seats)
