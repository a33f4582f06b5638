"""The best checkpoint by held-out evaluation, for each policy, and when no better one is to be expected."""

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


def judged_figures(held_out: Mapping[str, float], policies: Mapping[str, list[str]], seats: bool) -> dict[str, float]:
    """What an evaluation says of each policy (by name; `policies` has their roles), as far as it says anything.

    All policies are judged by `success`. Without it, or if each role has an outcome of its own (`seats`), a policy is
    judged by the mean of what its roles are trained on. Roles that play against each other are judged by what they win
    against the untrained model.
    """
    game = is_game(held_out)
    if "success" in held_out and not seats and not game:
        return dict.fromkeys(policies, held_out["success"])
    kind = AGAINST_UNTRAINED if game else "reward"
    found = {
        name: [held_out[f"{kind}/{role}"] for role in of if f"{kind}/{role}" in held_out]
        for name, of in policies.items()
    }
    return {name: fmean(values) for name, values in found.items() if values}


def is_game(held_out: Mapping[str, float]) -> bool:
    """Whether an evaluation has found that its roles play against each other."""
    return any(name.startswith(f"{AGAINST_UNTRAINED}/") for name in held_out)


def note_start(run: RolloutRun) -> None:
    """Before the first step: the policies that `init` names are the best so far, and their checkpoint is kept."""
    config = run.config.evaluation
    if run.config.init and not run.best and (config.keep_best or config.patience):
        run.best = _best_of(run, read_metrics(run.folder.path))


def note_best(run: RolloutRun, held_out: Mapping[str, float], progress: Progress) -> bool:
    """After a step with an evaluation: whether some policy is better than at any earlier one, so that the checkpoint of
    this step is to be kept. Ends the run where none has been for `evaluation.patience` evaluations."""
    config = run.config.evaluation
    if not held_out or not (config.keep_best or config.patience):
        return False
    lines = read_metrics(run.folder.path)
    if not is_game(held_out) and any(is_game(line["held_out"]) for line in lines):
        progress.say_once("no held-out game had a winner in this evaluation, so it judges no policy")
        return False
    if not _figures(run, held_out):
        known = ", ".join(name for name in held_out if name not in ("episodes", "failed")) or "none"
        progress.say_once(
            f"the held-out episodes have no reward that is trained on, so no checkpoint is best; known: {known}"
        )
        return False
    here = checkpoint_name(run.state.steps)
    run.best = {**run.best, **_best_of(run, lines, here)}
    better = any(best.checkpoint == here for best in run.best.values())
    if config.patience is None or better:
        return better
    last = max(steps_of(Path(best.checkpoint)) for best in run.best.values())
    since = sum(bool(line["held_out"]) for line in lines if line["step"] + 1 > last)
    if since >= config.patience:
        when = f"after step {last}" if last else "before the first step"
        run.ended = f"{since} evaluations in a row were no better than that {when}"
    return False


def find_best(run: RolloutRun) -> list[str]:
    """Find the best checkpoints of a run that goes on, by metrics.jsonl and the checkpoints that are there.

    Writes `best.json` anew where it names others, and returns what the user should know of those.
    """
    config, folder = run.config.evaluation, run.folder.checkpoints
    if not (config.keep_best or config.patience):
        return []
    run.best = found = _best_of(run, read_metrics(run.folder.path))
    if not config.keep_best:
        return []
    notes, named = [], read_best(folder)
    for name, best in named.items():
        if (folder / best.checkpoint).is_dir() and steps_of(Path(best.checkpoint)) <= run.state.steps:
            found.setdefault(name, best)
            continue
        left = f"the best that is left is {found[name].checkpoint} ({found[name].figure:.3f})" if name in found else ""
        said = f"the best checkpoint of {name} was {best.checkpoint} ({best.figure:.3f}), which is gone"
        notes.append(f"{said}; {left or 'no other was kept'}")
    if found != named:
        write_best(folder, found)
    return notes


def _best_of(run: RolloutRun, lines: Sequence[Mapping[str, Any]], now: str = "") -> dict[str, Best]:
    """By policy, the best evaluation in these lines of metrics.jsonl, the earlier one of equals.

    In a run that starts from other policies (`init`), the evaluation before the first step takes part too. If the best
    are kept, only checkpoints take part that are there, or that of `now`, which is not yet written.
    """
    evaluated = [(line["step"] + 1, line["held_out"]) for line in lines if line["held_out"]]
    games = [(steps, held_out) for steps, held_out in evaluated if is_game(held_out)]
    if games:
        evaluated = games
    elif run.config.init:
        evaluated.insert(0, (0, start_figures(run)))

    found: dict[str, Best] = {}
    for steps, held_out in evaluated:
        name = checkpoint_name(steps)
        if run.config.evaluation.keep_best and name != now and not (run.folder.checkpoints / name).is_dir():
            continue
        for policy, figure in _figures(run, held_out).items():
            if policy not in found or figure > found[policy].figure:
                found[policy] = Best(name, figure)
    return found


def _figures(run: RolloutRun, held_out: Mapping[str, float]) -> dict[str, float]:
    """What an evaluation says of each policy, in the roles that it has in evaluations."""
    policies = run.state.policies
    roles = {name: of for name in policies.trained if (of := policies.roles_of(name))}
    seats = any(recipe.attribution.seats for recipe in run.recipes_of_training)
    return judged_figures(held_out, roles, seats)
